"""Put an engine together from the configuration: executor, scheduler, policy, loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from msgspec.structs import replace

from ferrule import log
from ferrule.assembly.first_adapters import read_first
from ferrule.assembly.health import HealthWatch
from ferrule.assembly.integrity import verify
from ferrule.assembly.limits import scheduler_limits, sized
from ferrule.config import Resolved, SchedulerConfig, WorkerSettings
from ferrule.config.chosen import chosen_plugins
from ferrule.engine.loop import EngineLoop
from ferrule.env import before_libraries
from ferrule.errors import ConfigError
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.scheduler import Scheduler, SchedulingPolicy
from ferrule.live import Live
from ferrule.plugin import Component, check_plugins
from ferrule.plugin.faults import fault_logger, naming_culprit
from ferrule.types import Adapter, AdapterInfo, AdapterLoad, ModelInfo
from ferrule.wire.messages import Channel

_log = log.get("engine")


@dataclass(frozen=True)
class Engine:
    """The parts that the engine's process, or its thread, runs and shuts down."""

    loop: EngineLoop
    executor: Executor
    health: HealthWatch
    info: ModelInfo
    num_blocks: int  # the null block included


def open_executor(config: Resolved, plugins: Plugins) -> Executor:
    """Make the executor, without starting it. Raises PluginError.

    The chosen plugins are checked first, also those that are used only once the model is loaded, so that an unusable
    plugin is reported before weights are loaded.
    """
    before_libraries()
    with naming_culprit(plugins):
        chosen = list(chosen_plugins(config, plugins))
        check_plugins(plugins, chosen, Component.ENGINE)
        executor: Executor = plugins.make("executor", config.parallel.distributed_executor_backend)
        if executor.runs_model:
            check_plugins(plugins, chosen, Component.MODEL)
    return executor


def build_engine(
    config: Resolved,
    plugins: Plugins,
    channel: Channel,
    executor: Executor,
    *,
    cache_root: bytes,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load the model, size the cache, and connect the loop to its clients. Raises StartupError.

    Engines with the same `cache_root` give equal blocks equal digests, so their caches can be compared. Keep it secret:
    who knows it can compute digests. `clock` tells the time that requests' arrivals are measured in.
    """
    with naming_culprit(plugins):
        return _built(config, plugins, channel, executor, cache_root, clock)


def _built(
    config: Resolved,
    plugins: Plugins,
    channel: Channel,
    executor: Executor,
    cache_root: bytes,
    clock: Callable[[], float],
) -> Engine:
    if config.load.verify_weights:
        verify(Path(config.model.model))
    policy: SchedulingPolicy = plugins.make("policy", config.scheduler.scheduling_policy)
    info = executor.start(WorkerSettings.of(config), plugins)
    try:
        info, num_blocks = sized(config, info)
        executor.init_cache(num_blocks)
        info = replace(info, adapters=_read_adapters(config, info, executor))
        limits = replaced(scheduler_limits(config, info, num_blocks), cache_root=cache_root)
        scheduler: Scheduler = plugins.make("scheduler", config.scheduler.scheduler_cls, limits, policy, plugins)
        _tell_of_order(config, scheduler)
        loop = EngineLoop(
            scheduler,
            executor,
            channel,
            clock,
            sleep_mode=config.model.enable_sleep_mode,
            debug=config.observability.debug,
        )
        loop.log_failure = fault_logger(plugins, loop.log_failure)
        Live(loop, clock)
    except BaseException:
        executor.shutdown()
        raise
    return Engine(loop, executor, HealthWatch(loop, executor), info, num_blocks)


def _read_adapters(config: Resolved, info: ModelInfo, executor: Executor) -> dict[str, AdapterInfo]:
    """Check the adapters of --lora-modules, and describe them by their names. Raises ConfigError."""
    if config.lora.enable_lora and not info.adapter_slots:
        name = config.parallel.distributed_executor_backend
        raise ConfigError(f"--enable-lora: --distributed-executor-backend {name} has no adapters.")
    infos = {}

    def read(adapter: Adapter) -> None:
        executor.prepare(AdapterLoad(adapter=adapter, slot=0)).result()
        infos[adapter.name] = AdapterInfo(**executor.call("describe_adapter", (adapter.name,)))

    read_first(config.lora, read)
    return infos


def _tell_of_order(config: Resolved, scheduler: Scheduler) -> None:
    """Warn of a policy that was chosen and does not decide in which order requests are admitted."""
    policy, name = config.scheduler.scheduling_policy, config.scheduler.scheduler_cls
    if scheduler.own_order and policy != SchedulerConfig().scheduling_policy:
        _log.warning("--scheduling-policy %s: --scheduler-cls %s admits requests in an order of its own", policy, name)
