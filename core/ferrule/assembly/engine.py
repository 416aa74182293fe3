"""Put an engine together from the configuration: executor, scheduler, policy, loop."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from msgspec.structs import replace

from ferrule.config import Config
from ferrule.config.resolve import resolve
from ferrule.engine.cache import capacity, footprint
from ferrule.engine.loop import EngineLoop
from ferrule.env import before_libraries
from ferrule.errors import ConfigError
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits
from ferrule.types import ModelInfo
from ferrule.wire.messages import Channel


@dataclass(frozen=True)
class Engine:
    """What the engine's process, or its thread, runs and shuts down."""

    loop: EngineLoop
    executor: Executor
    info: ModelInfo
    num_blocks: int  # the null block included


def build_engine(config: Config, plugins: Plugins, channel: Channel) -> Engine:
    """Load the model, size the cache, and connect the loop to its clients. Raises StartupError."""
    before_libraries()
    executor: Executor = plugins.make("executor", config.parallel.distributed_executor_backend or "uni")
    info = executor.start(config, plugins)
    try:
        config = resolve(config, info.max_model_len)
        info, num_blocks = _sized(config, info)
        executor.init_cache(num_blocks)
        scheduler = _scheduler(config, plugins, info, num_blocks)
        loop = EngineLoop(
            scheduler,
            executor,
            channel,
            time.monotonic,
            sleep_mode=config.model.enable_sleep_mode,
            debug=config.observability.debug,
        )
    except BaseException:
        executor.shutdown()
        raise
    return Engine(loop, executor, info, num_blocks)


def _sized(config: Config, info: ModelInfo) -> tuple[ModelInfo, int]:
    """The model as it can be served, and the blocks in the pool, the null block included.

    One request of the longest length must fit. A length that the user did not set is cut to what does; one that was
    set is a ConfigError. A number of blocks that was set is taken as it is: what cannot fit is refused at the gate.
    """
    if config.cache.num_gpu_blocks_override is not None:
        return info, config.cache.num_gpu_blocks_override
    limits = _limits(config, info, info.max_blocks)
    room = capacity(limits)
    if room == info.max_model_len:
        return info, info.max_blocks
    needed = (1 + footprint(limits, info.max_model_len - 1)) * info.page_bytes / 2**30
    problem = f"The KV cache has room for {room} tokens, but one request may have {info.max_model_len}"
    remedy = f"{needed:.2f} GiB (FERRULE_CPU_KVCACHE_SPACE on CPU, --gpu-memory-utilization elsewhere)"
    if config.model.max_model_len is not None or room < 2:
        raise ConfigError(
            f"{problem} (--max-model-len).",
            f"Give the cache {remedy}, or set --max-model-len to {max(room, 2)} or less.",
        )
    note = f"{problem}: --max-model-len is {room}. For all of it, give the cache {remedy}."
    return replace(info, max_model_len=room, notes=(*info.notes, note)), info.max_blocks


def _limits(config: Config, info: ModelInfo, num_blocks: int) -> SchedulerLimits:
    section = config.scheduler
    if section.max_num_seqs is None or section.max_num_batched_tokens is None:
        raise ConfigError("The scheduler's limits are not resolved.")
    return SchedulerLimits(
        groups=info.groups,
        num_blocks=num_blocks,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        depth=section.pipeline_depth or info.depth,
        chunked_prefill=section.enable_chunked_prefill,
        prefix_caching=config.cache.enable_prefix_caching,
        hash_algo=config.cache.prefix_caching_hash_algo,
        long_prefill_token_threshold=section.long_prefill_token_threshold,
        max_num_partial_prefills=section.max_num_partial_prefills,
        max_long_partial_prefills=section.max_long_partial_prefills,
        prompt_share=0 if section.long_prefill_token_threshold else info.prompt_share,
        prompt_border=info.prompt_border,
        cache_root=os.urandom(32),
    )


def _scheduler(config: Config, plugins: Plugins, info: ModelInfo, num_blocks: int) -> Scheduler:
    policy = plugins.make("policy", config.scheduler.scheduling_policy)
    name, limits = config.scheduler.scheduler_cls or "default", _limits(config, info, num_blocks)
    scheduler: Scheduler = plugins.make("scheduler", name, limits, policy, plugins)
    return scheduler
