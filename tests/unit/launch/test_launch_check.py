"""What is wrong with templates, tokenizers and plugins is found before the engine is ready, in every kind of start."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import ferrule
from ferrule import LLM
from ferrule.config import Config, FrontendConfig, ModelConfig
from ferrule.config.parse import parse
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError, PluginError, StartupError
from ferrule.frontend.inputs import open_inputs
from ferrule.hooks import HookRunner
from ferrule.launch import api_main
from ferrule.launch.check import check_start
from ferrule.launch.prepare import prepare
from ferrule.llm import offline
from ferrule.plugin import discover
from ferrule.wire.board import Board
from ferrule_contrib import tiny
from ferrule_testkit.wheels import Distribution

_BAD = "{% for %}"


class _NeverReady:
    """A client whose engine still loads."""

    def __init__(self) -> None:
        self.board = Board()

    async def wait_ready(self) -> None:
        raise AssertionError("the engine was waited for")

    async def close(self) -> None:
        """Nothing is open."""


def test_an_api_process_does_not_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(config: Any, plugins: Any, listener: Any, connect: Any, hooks: Any, board: Any) -> int:
        await connect()
        return 0

    monkeypatch.setattr(api_main, "serve", serve)
    config = resolve(Config(model=ModelConfig(model=str(tiny.path())), frontend=FrontendConfig(chat_template=_BAD)))
    client: Any = _NeverReady()
    with socket.socket() as listener, pytest.raises(ConfigError, match="syntax error in line 1"):
        asyncio.run(api_main._serve(config, discover(), HookRunner(), listener, client))


def test_an_llm_does_not_begin_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(*given: Any) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(offline, "InlineClient", client)
    with pytest.raises(ConfigError, match="syntax error in line 1"):
        LLM(str(tiny.path()), chat_template=_BAD)


WRONG = """
from ferrule.interfaces.{module} import {base}

class Wrong({base}):
    def __init__(self, *given, **named):
        {constructor}

    def {method}(self, one, two, three, four, five):
        ...

Wrong.__abstractmethods__ = frozenset()
"""
FERRULE = f"ferrule {ferrule.__version__}"
KINDS = {  # kind: module, base class, a method, what chooses it
    "tokenizer": ("tokenizer", "TokenizerSource", "open", ("--tokenizer-mode", "acme")),
    "tool_parser": ("parsers", "ToolParser", "feed", ("--tool-call-parser", "acme")),
    "reasoning_parser": ("parsers", "ReasoningParser", "feed", ("--reasoning-parser", "acme")),
    "logits_processor": ("sampler", "LogitsProcessor", "apply", ("--logits-processor-pattern", "ac.*")),
    "stat_logger": ("stats", "StatLogger", "on_engine", ()),
    "router": ("http", "Router", "router", ("--routers", "+acme")),
    "sampler": ("sampler", "Sampler", "sample", ("--sampler", "acme")),
    "scheduler": ("scheduler", "Scheduler", "commit", ("--scheduler-cls", "acme")),
    "policy": ("scheduler", "SchedulingPolicy", "key", ("--scheduling-policy", "acme")),
    "executor": ("executor", "Executor", "submit", ("--distributed-executor-backend", "acme")),
}


def _chosen(site: Any, kind: str, constructor: str = "", method: str = "") -> tuple[Any, Any]:
    """The configuration that chooses a wrong plugin, and the plugins."""
    module, base, wrong, argv = KINDS[kind]
    source = WRONG.format(module=module, base=base, constructor=constructor or "...", method=method or wrong)
    site.install(
        Distribution(
            name="acme-dist",
            entry_points={f"ferrule.v2.{kind}": {"acme": "acme_wrong:Wrong"}},
            files={"acme_wrong.py": source},
        )
    )
    parsed = parse([str(tiny.path()), *argv])
    return prepare(parsed.config, (), discover(), "launch")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_refuses_a_wrong_plugin_of_any_kind(site: Any, kind: str) -> None:
    config, plugins = _chosen(site, kind)
    told = rf"^Plugin {kind}:acme of acme-dist 1\.0: Wrong\.{KINDS[kind][2]}\(.*\) cannot be called with"
    with pytest.raises(PluginError, match=told):
        check_start(config, plugins)


@pytest.mark.parametrize("kind", ["tokenizer", "tool_parser", "reasoning_parser", "logits_processor", "stat_logger"])
def test_the_frontend_refuses_a_wrong_plugin_before_it_opens_anything(site: Any, kind: str) -> None:
    config, plugins = _chosen(site, kind)
    with pytest.raises(PluginError, match=rf"^Plugin {kind}:acme of acme-dist 1\.0: Wrong\."):
        open_inputs(config, plugins)


@pytest.mark.parametrize("kind", ["tool_parser", "reasoning_parser", "policy", "router"])
def test_a_constructor_that_raises_is_found_without_a_request(site: Any, kind: str) -> None:
    config, plugins = _chosen(site, kind, "raise OSError('gone')", "unused")
    with pytest.raises(PluginError, match=rf"^Plugin {kind}:acme of acme-dist 1\.0 cannot be made: OSError: gone"):
        check_start(config, plugins)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("policy:fcfz={}", "There is no policy plugin 'fcfz'. Did you mean 'fcfs'?"),
        (
            "hub:huggingface={}",
            f"--plugin-config hub:huggingface of ferrule {ferrule.__version__}: this plugin takes no options.",
        ),
        ("polcy:fcfs={}", "'polcy' is no kind of plugin. Did you mean 'policy'?"),
    ],
)
def test_options_of_a_plugin_that_is_not_there_are_refused(written: str, told: str) -> None:
    parsed = parse([str(tiny.path()), "--plugin-config", written])
    with pytest.raises(StartupError) as caught:
        prepare(parsed.config, (), discover(), "launch")
    assert caught.value.message == told


def test_options_of_a_plugin_that_takes_none_are_refused_whether_it_is_used_or_not() -> None:
    parsed = parse([str(tiny.path()), "--plugin-config", "policy:priority={}"])
    config, plugins = prepare(parsed.config, (), discover(), "launch")
    with pytest.raises(ConfigError, match=r"policy:priority of ferrule .*: this plugin takes no options"):
        check_start(config, plugins)
