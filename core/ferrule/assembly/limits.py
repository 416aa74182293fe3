"""What the scheduler keeps to and requests are checked against: known once the model is loaded.

A checkpoint's own context length may exceed what the default cache holds (40,960 tokens for a 0.6B model in 4 GiB): the
server then starts with the length that fits and logs it. It refuses to start only when `--max-model-len` was given.
"""

from __future__ import annotations

from msgspec.structs import replace

from ferrule.config import DeviceSettings, WorkerSettings
from ferrule.config.resolve import step_tokens
from ferrule.engine.cache import capacity, footprint
from ferrule.errors import ConfigError
from ferrule.interfaces.platform import DeviceMemory
from ferrule.interfaces.scheduler import GuessLimits, SchedulerLimits
from ferrule.types import ModelInfo, Targets


def cache_bytes(config: WorkerSettings, memory: DeviceMemory) -> int:
    """Return the bytes for the KV cache: the user's number, else what the device has left. Raises ConfigError where
    nothing is left.
    """
    return config.cache.kv_cache_memory_bytes or memory.cache_bytes(DeviceSettings.of(config))


def scheduler_limits(config: WorkerSettings, info: ModelInfo, num_blocks: int) -> SchedulerLimits:
    """Return the scheduler's limits, from the options and the executor's description of the model. `num_blocks`
    includes the null block.

    Raises ConfigError where whole prompts cannot fit into a step.
    """
    section = config.scheduler
    return SchedulerLimits(
        groups=info.groups,
        num_blocks=num_blocks,
        max_num_seqs=info.max_num_seqs or section.max_num_seqs,
        max_num_batched_tokens=step_tokens(section, info.max_model_len, info.splits_prompts),
        max_model_len=info.max_model_len,
        depth=info.depth if section.pipeline_depth is None else section.pipeline_depth,
        chunked_prefill=section.enable_chunked_prefill and info.splits_prompts,
        prefix_caching=config.cache.enable_prefix_caching,
        hash_algo=config.cache.prefix_caching_hash_algo,
        long_prefill_token_threshold=section.long_prefill_token_threshold,
        max_num_partial_prefills=section.max_num_partial_prefills,
        max_long_partial_prefills=section.max_long_partial_prefills,
        targets=Targets((section.target_first_token_ms or 0) / 1000, (section.target_inter_token_ms or 0) / 1000),
        prompt_share=0 if section.long_prefill_token_threshold else info.prompt_share,
        prompt_border=info.prompt_border,
        num_snapshots=info.max_snapshots,
        adapter_slots=info.adapter_slots,
        guesses=GuessLimits(
            most=config.speculative.num_tokens if config.speculative.method else 0,
            max_len=config.speculative.max_model_len or 0,
            max_requests=config.speculative.disable_by_batch_size or 0,
            adaptive=config.speculative.adaptive,
            lookahead=info.lookahead,
        ),
    )


def least_cache_bytes(config: WorkerSettings, info: ModelInfo) -> int:
    """Return the bytes for a KV cache that suffices for one request of the longest length beside the states of all
    requests.
    """
    limits = scheduler_limits(config, info, info.max_blocks)
    pages = (1 + footprint(limits, info.max_model_len - 1)) * info.page_bytes
    if not info.state_bytes:
        return pages
    if config.cache.enable_prefix_caching:
        pages = -(-4 * pages // 3)  # a quarter is for states at the ends of prefixes
    states = info.state_bytes * config.scheduler.max_num_seqs
    return pages + (min(states, max(pages, info.state_bytes)) if config.scheduler.fits_states else states)


def sized(config: WorkerSettings, info: ModelInfo) -> tuple[ModelInfo, int]:
    """Return the description of the model as it can be served, and the number of blocks in the pool, the null block
    included.

    One request of the longest length must fit. A length that the user did not set is cut to one that fits; a length
    that was set and does not fit is a ConfigError. A number of blocks that was set is used as it is: a request that
    cannot fit is refused at the gate.
    """
    if config.cache.num_gpu_blocks_override is not None:
        return info, config.cache.num_gpu_blocks_override + 1
    limits = scheduler_limits(config, info, info.max_blocks)
    room = capacity(limits)
    if room == info.max_model_len:
        return info, info.max_blocks
    needed = -(-least_cache_bytes(config, info) >> 20)  # MiB
    problem = f"The KV cache has room for {room} tokens, but one request may have {info.max_model_len}"
    remedy = f"{needed} MiB (--kv-cache-memory-bytes {needed}M, or --gpu-memory-utilization on a GPU)"
    if config.model.max_model_len is not None or room < 2:
        raise ConfigError(
            f"{problem} (--max-model-len).",
            f"Give the cache {remedy}, or set --max-model-len to {max(room, 2)} or less.",
        )
    note = f"{problem}: --max-model-len is {room}. For all of it, give the cache {remedy}."
    return replace(info, max_model_len=room, notes=(*info.notes, note)), info.max_blocks
