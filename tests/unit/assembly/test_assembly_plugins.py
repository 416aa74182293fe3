"""Wrong plugins of an engine are found before the model is read, and what fails later has the plugin's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrule.assembly.engine import Engine, build_engine, open_executor
from ferrule.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import check_names, resolve, with_scheduler
from ferrule.config.resolved import Resolved, WorkerSettings
from ferrule.env import Environment
from ferrule.errors import ConfigError, PluginError
from ferrule.plugin import Plugins, discover
from ferrule.types import CacheGroup, EngineRequest, ModelInfo, TokenSampling
from ferrule.wire.messages import Submit
from ferrule.wire.queues import QueueChannel
from tests.fakes.executor import FakeExecutor
from tools.wheels import Distribution

WRONG = """
from ferrule.interfaces.{module} import {base}

class Wrong({base}):
    def __init__(self, one, two, three, four):
        ...

Wrong.__abstractmethods__ = frozenset()
"""
SAMPLER = """
from ferrule.interfaces.sampler import Sampler

class Late(Sampler):
    def sample(self, logits, batch):
        raise LookupError("no dice")
"""
PLATFORM = """
from ferrule.errors import ConfigError
from ferrule_plugins.platform.cpu import CpuPlatform

class Memory:
    def __init__(self, memory):
        self._memory = memory

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def cache_bytes(self, config):
        raise {what}

class Late(CpuPlatform):
    def memory(self):
        return Memory(super().memory())
"""
OWN_ORDER = """
from ferrule.engine.scheduler import DefaultScheduler
from ferrule.interfaces.scheduler import Scheduler

class OwnOrder(DefaultScheduler):
    own_order = True

class Half(Scheduler):
    def add(self, request, now):
        pass

class Other:
    pass

number = 1
"""
SCHEDULER = """
from ferrule.engine.scheduler import DefaultScheduler

class Late(DefaultScheduler):
    def add(self, request, now):
        raise LookupError("no queue")
"""


def distribution(kind: str, source: str, name: str) -> Distribution:
    return Distribution(
        name="acme-parts",
        version="3.0",
        entry_points={f"ferrule.v1.{kind}": {"acme": f"acme_parts:{name}"}},
        files={"acme_parts.py": source},
    )


def config(model: Path | str, **sections: Any) -> Any:
    base = Config(
        model=ModelConfig(model=str(model), dtype="float32"), cache=CacheConfig(num_gpu_blocks_override=64), **sections
    )
    return resolve(base)


CHOSEN: dict[str, Any] = {
    "sampler": lambda model: replace(config(model), model=replace(config(model).model, sampler="acme")),
    "scheduler": lambda model: config(model, scheduler=SchedulerConfig(scheduler_cls="acme")),
    "policy": lambda model: config(model, scheduler=SchedulerConfig(scheduling_policy="acme")),
    "platform": lambda model: config(model, device=DeviceConfig(device="acme")),
    "attention": lambda model: config(model, device=DeviceConfig(attention_backend="acme")),
}


def started(config: Resolved, plugins: Plugins, channel: QueueChannel) -> Engine:
    return build_engine(config, plugins, channel, open_executor(config, plugins), cache_root=b"root")


def test_an_executor_is_given_what_a_worker_needs_and_no_more() -> None:
    given: list[WorkerSettings] = []

    class Recording(FakeExecutor):
        def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
            given.append(config)
            return super().start(config, plugins)

    told, plugins = config("/no/such/model", env=Environment(api_key="secret")), discover()
    channel = QueueChannel(lambda message: None)
    build_engine(told, plugins, channel, Recording((CacheGroup("full", 16),)), cache_root=b"root")
    assert [type(each) for each in given] == [WorkerSettings]
    assert given[0] == WorkerSettings.of(told)


@pytest.mark.parametrize(
    ("kind", "module", "base"),
    [
        ("sampler", "sampler", "Sampler"),
        ("scheduler", "scheduler", "Scheduler"),
        ("policy", "scheduler", "SchedulingPolicy"),
        ("platform", "platform", "Platform"),
        ("attention", "attention", "AttentionBackend"),
    ],
)
def test_a_wrong_plugin_is_found_before_the_model_is_read(site: Any, kind: str, module: str, base: str) -> None:
    site.install(distribution(kind, WRONG.format(module=module, base=base), "Wrong"))
    told = rf"Plugin {kind}:acme of acme-parts 3\.0: Wrong is made with \(.*\), and its constructor takes"
    with pytest.raises(PluginError, match=told):
        started(CHOSEN[kind]("/no/such/model"), site.discover(), QueueChannel(lambda message: None))


@pytest.mark.parametrize(
    ("kind", "source", "error", "told"),
    [
        ("sampler", SAMPLER, PluginError, "Plugin sampler:acme of acme-parts 3.0 failed: LookupError: no dice"),
        (
            "platform",
            PLATFORM.format(what="LookupError('no room')"),
            PluginError,
            "Plugin platform:acme of acme-parts 3.0 failed: LookupError: no room",
        ),
        (
            "platform",
            PLATFORM.format(what="ConfigError('Not enough memory.')"),
            ConfigError,
            "platform:acme of acme-parts 3.0: Not enough memory.",
        ),
    ],
    ids=["sampler in warm-up", "platform", "advice of a platform"],
)
def test_what_a_plugin_raises_while_the_engine_starts_names_it(
    site: Any, tiny_llama: Path, kind: str, source: str, error: type[Exception], told: str
) -> None:
    site.install(distribution(kind, source, "Late"))
    with pytest.raises(error) as caught:
        started(CHOSEN[kind](tiny_llama), site.discover(), QueueChannel(lambda message: None))
    assert str(caught.value) == told


@pytest.mark.parametrize(("policy", "told"), [("fcfs", 0), ("priority", 1)])
def test_a_policy_that_the_scheduler_does_not_follow_is_told(
    site: Any, tiny_llama: Path, caplog: pytest.LogCaptureFixture, policy: str, told: int
) -> None:
    site.install(distribution("scheduler", OWN_ORDER, "OwnOrder"))
    section = SchedulerConfig(scheduler_cls="acme_parts.OwnOrder", scheduling_policy=policy)
    resolved = config(tiny_llama, scheduler=section)
    plugins = with_scheduler(resolved, site.discover())
    assert plugins.title("scheduler", "acme_parts.OwnOrder") == "scheduler:acme_parts.OwnOrder of module acme_parts"
    started(resolved, plugins, QueueChannel(lambda message: None)).executor.shutdown()
    said = [record.getMessage() for record in caplog.records if "--scheduling-policy" in record.getMessage()]
    assert (
        said
        == ["--scheduling-policy priority: --scheduler-cls acme_parts.OwnOrder admits requests in an order of its own"][
            :told
        ]
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("acme_parts.Nothing", r"module acme_parts cannot be imported: AttributeError: .*Nothing"),
        ("no_such.module.Class", r"cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
        ("acme_parts.Half", r"Half lacks .*commit.* of ferrule\.interfaces\.scheduler\.Scheduler"),
        ("acme_parts.Other", r"Other does not derive from ferrule\.interfaces\.scheduler\.Scheduler"),
        ("acme_parts.number", r"acme_parts:number is int, not a class"),
    ],
)
def test_an_import_path_of_no_scheduler_says_what_is_missing(site: Any, name: str, told: str) -> None:
    site.install(distribution("scheduler", OWN_ORDER, "OwnOrder"))
    resolved = config("/no/such/model", scheduler=SchedulerConfig(scheduler_cls=name))
    plugins = with_scheduler(resolved, site.discover())
    check_names(resolved, plugins)
    with pytest.raises(PluginError, match=told):
        started(resolved, plugins, QueueChannel(lambda message: None))


def test_a_fault_while_the_engine_runs_is_logged_with_the_plugin(
    site: Any, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.install(distribution("scheduler", SCHEDULER, "Late"))
    channel = QueueChannel(lambda message: None)
    engine: Engine = started(CHOSEN["scheduler"](tiny_llama), site.discover(), channel)
    try:
        channel.post(Submit(EngineRequest(id="one", prompt_ids=(1,), work=TokenSampling(seed=0, max_tokens=1))))
        engine.loop.step()
    finally:
        engine.executor.shutdown()
    (fault,) = [record for record in caplog.records if record.name == "ferrule.plugin"]
    assert fault.getMessage() == "plugin scheduler:acme of acme-parts 3.0 raised in adding request one"
    assert fault.exc_info is not None
