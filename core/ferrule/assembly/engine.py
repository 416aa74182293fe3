"""Put an engine together from the configuration: executor, scheduler, policy, loop."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from msgspec.structs import replace

from ferrule.assembly.health import HealthWatch
from ferrule.assembly.integrity import verify
from ferrule.assembly.limits import least_cache_bytes, scheduler_limits
from ferrule.config import Resolved
from ferrule.config.chosen import chosen_plugins
from ferrule.engine.cache import capacity
from ferrule.engine.loop import EngineLoop
from ferrule.env import before_libraries
from ferrule.errors import ConfigError
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import Scheduler, SchedulingPolicy
from ferrule.plugin import Component, check_plugins
from ferrule.plugin.faults import fault_logger, naming_culprit
from ferrule.types import ModelInfo
from ferrule.wire.messages import Channel


@dataclass(frozen=True)
class Engine:
    """What the engine's process, or its thread, runs and shuts down."""

    loop: EngineLoop
    executor: Executor
    health: HealthWatch
    info: ModelInfo
    num_blocks: int  # the null block included


def open_executor(config: Resolved, plugins: Plugins) -> Executor:
    """The executor, not started. The plugins that are chosen are checked first, those included that are used once the
    model is loaded, so that one that cannot be used is reported before weights are loaded. Raises PluginError."""
    before_libraries()
    with naming_culprit(plugins):
        chosen = list(chosen_plugins(config, plugins))
        check_plugins(plugins, chosen, Component.ENGINE)
        executor: Executor = plugins.make("executor", config.parallel.distributed_executor_backend)
        if executor.runs_model:
            check_plugins(plugins, chosen, Component.MODEL)
    return executor


def build_engine(config: Resolved, plugins: Plugins, channel: Channel, executor: Executor) -> Engine:
    """Load the model, size the cache, and connect the loop to its clients. Raises StartupError."""
    with naming_culprit(plugins):
        return _built(config, plugins, channel, executor)


def _built(config: Resolved, plugins: Plugins, channel: Channel, executor: Executor) -> Engine:
    if config.load.verify_weights:
        verify(Path(config.model.model))
    policy: SchedulingPolicy = plugins.make("policy", config.scheduler.scheduling_policy)
    info = executor.start(config, plugins)
    try:
        info, num_blocks = _sized(config, info)
        executor.init_cache(num_blocks)
        limits = replaced(scheduler_limits(config, info, num_blocks), cache_root=os.urandom(32))
        scheduler: Scheduler = plugins.make("scheduler", config.scheduler.scheduler_cls, limits, policy, plugins)
        loop = EngineLoop(
            scheduler,
            executor,
            channel,
            time.monotonic,
            sleep_mode=config.model.enable_sleep_mode,
            debug=config.observability.debug,
        )
        loop.log_failure = fault_logger(plugins, loop.log_failure)
    except BaseException:
        executor.shutdown()
        raise
    return Engine(loop, executor, HealthWatch(loop, executor), info, num_blocks)


def _sized(config: Resolved, info: ModelInfo) -> tuple[ModelInfo, int]:
    """The model as it can be served, and the blocks in the pool, the null block included.

    One request of the longest length must fit. A length that the user did not set is cut to what does; one that was
    set is a ConfigError. A number of blocks that was set is taken as it is: what cannot fit is refused at the gate.
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
