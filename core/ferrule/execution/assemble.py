"""Put an engine together from the configuration: executor, scheduler, policy, loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ferrule.config import Config
from ferrule.config.resolve import resolve
from ferrule.engine.cache import footprint
from ferrule.engine.loop import EngineLoop
from ferrule.env import calm_threads
from ferrule.errors import ConfigError
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits
from ferrule.types import FromEngine, ModelInfo, ToEngine

Receive = Callable[[float], list[tuple[bytes, ToEngine]]]
Send = Callable[[bytes, FromEngine], None]


@dataclass(frozen=True)
class Engine:
    """What the engine's process, or its thread, runs and shuts down."""

    loop: EngineLoop
    executor: Executor
    info: ModelInfo
    num_blocks: int  # the null block included


def build_engine(config: Config, plugins: Plugins, receive: Receive, send: Send) -> Engine:
    """Load the model, size the cache, and connect the loop to its client. Raises StartupError."""
    calm_threads()
    executor: Executor = plugins.load("executor", config.parallel.distributed_executor_backend or "uni")()
    info = executor.start(config, plugins)
    try:
        config = resolve(config, info.max_model_len)
        num_blocks = _num_blocks(config, info)
        executor.init_cache(num_blocks)
        scheduler = _scheduler(config, plugins, info, num_blocks)
        loop = EngineLoop(scheduler, executor, receive, send, time.monotonic)
    except BaseException:
        executor.shutdown()
        raise
    return Engine(loop, executor, info, num_blocks)


def _num_blocks(config: Config, info: ModelInfo) -> int:
    """Blocks in the pool, the null block included. Unless the user set their number, one longest request must fit."""
    override = config.cache.num_gpu_blocks_override
    if override is not None:
        return override
    num_blocks, block_size = info.max_blocks, info.groups[0].block_size
    limits = _limits(config, info, num_blocks)
    needed = 1 + footprint(limits, info.max_model_len - 1)
    if num_blocks < needed:
        gib = needed * info.page_bytes / 2**30
        raise ConfigError(
            f"The KV cache holds {max(0, num_blocks - 1) * block_size} tokens, but one request may have "
            f"{info.max_model_len} (--max-model-len).",
            f"Give the cache {gib:.2f} GiB (FERRULE_CPU_KVCACHE_SPACE on CPU, --gpu-memory-utilization elsewhere), or "
            f"set --max-model-len to {max(1, (num_blocks - 1) // sum(g.paged for g in info.groups)) * block_size} "
            "or less.",
        )
    return num_blocks


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
        prompt_border=info.prompt_border,
        cache_root=os.urandom(32),
    )


def _scheduler(config: Config, plugins: Plugins, info: ModelInfo, num_blocks: int) -> Scheduler:
    policy = plugins.load("policy", config.scheduler.scheduling_policy)()
    build = plugins.load("scheduler", config.scheduler.scheduler_cls or "default")
    scheduler: Scheduler = build(_limits(config, info, num_blocks), policy)
    return scheduler
