"""The description of a model that a worker gives, with what its cache has room for."""

from __future__ import annotations

from msgspec.structs import replace

from ferrule.assembly.limits import cache_bytes, scheduler_limits
from ferrule.assembly.model import Loaded
from ferrule.assembly.speculator import own_bytes
from ferrule.config import DeviceSettings, WorkerSettings
from ferrule.engine.cache import footprint
from ferrule.errors import ConfigError
from ferrule.interfaces.speculator import Speculator
from ferrule.runner.cache import CacheMap, StateStore, snapshots_in
from ferrule.types import ModelInfo


def describe(
    config: WorkerSettings, loaded: Loaded, speculator: Speculator | None, layers: CacheMap, store: StateStore
) -> ModelInfo:
    """Return the description of a model with what is cached, and of its speculator.

    Raises ConfigError for what does not fit, or what the model does not do.
    """
    info = _with_guesses(config, loaded, speculator)
    page_bytes = layers.page_size * loaded.cache_type.itemsize
    memory = loaded.platform.memory()
    room, kept = cache_bytes(config, memory), store.num_bytes
    if kept > room:
        raise ConfigError(
            f"The states of --max-num-seqs requests need {kept / 2**30:.2f} GiB, and the cache has "
            f"{room / 2**30:.2f} GiB.",
            "Give the cache more (--kv-cache-memory-bytes, or --gpu-memory-utilization on a GPU), or set "
            "--max-num-seqs to less.",
        )
    if config.model.enable_prompt_embeds and not info.hidden_size:
        raise ConfigError(f"--enable-prompt-embeds: {info.implementation} takes no embeddings.")
    notes = info.notes
    state_bytes = store.request_bytes
    caching = config.cache.enable_prefix_caching
    snapshots = snapshots_in(room - kept, state_bytes, page_bytes) if caching else 0
    if kept and caching and not snapshots:
        notes += ("prefixes are not cached: the cache has no room for states at their ends",)
    fewer = store.slots if store.slots < config.scheduler.max_num_seqs else None
    if fewer:
        notes += (f"at most {fewer} requests run at a time: the states of more do not fit; see --max-num-seqs",)
    left = room - kept - snapshots * state_bytes
    max_blocks = left // page_bytes if page_bytes else 2  # without pages, no block is ever used
    info = replace(info, max_num_seqs=fewer, notes=notes, max_snapshots=snapshots, state_bytes=state_bytes)
    info = replace(info, groups=layers.groups, page_bytes=page_bytes, max_blocks=max_blocks)
    keeps = config.cache.kv_cache_memory_bytes or memory.keeps_more(DeviceSettings.of(config))
    spares = page_bytes and not keeps
    return replace(info, max_blocks=min(max_blocks, _usable(config, info))) if spares else info


def _with_guesses(config: WorkerSettings, loaded: Loaded, speculator: Speculator | None) -> ModelInfo:
    """Return the description of a model with its speculator, whose weights count, and what that writes to."""
    info, section = loaded.info, config.speculative
    if speculator is None:
        return info
    own, lookahead = own_bytes(speculator, loaded.model), section.num_tokens if speculator.cache_specs() else 0
    draft = f" of {section.settings['model']}" if section.settings.get("model") else ""
    note = f"speculation: {section.method}{draft}, up to {section.num_tokens} guesses, weights of {own / 2**20:.1f} MiB"
    return replace(info, weight_bytes=info.weight_bytes + own, lookahead=lookahead, notes=(*info.notes, note))


def _usable(config: WorkerSettings, info: ModelInfo) -> int:
    """Count the blocks that as many requests as may run can fill, each with the longest text, and the null block."""
    limits = scheduler_limits(config, info, info.max_blocks)
    return 1 + limits.max_num_seqs * footprint(limits, info.max_model_len)
