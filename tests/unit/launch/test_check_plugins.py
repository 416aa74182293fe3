"""Plugins that cannot be used are found before the engine is ready, whatever their kind."""

from __future__ import annotations

from typing import Any

import pytest

import ferrule
from ferrule.config.parse import parse
from ferrule.errors import ConfigError, PluginError, StartupError
from ferrule.frontend.inputs import open_inputs
from ferrule.frontend.stat_loggers import open_loggers
from ferrule.launch.check import check_start
from ferrule.launch.prepare import prepare
from ferrule.plugin import discover
from ferrule_contrib import tiny
from tests.fakes.engine import FakeEngine
from tools.wheels import Distribution

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
    "stat_logger": ("stats", "StatLogger", "on_engine", ("--plugins-allow", "stat_logger:acme")),
    "router": ("router", "Router", "router", ("--routers", "+acme")),
    "sampler": ("sampler", "Sampler", "sample", ("--sampler", "acme")),
    "scheduler": ("scheduler", "Scheduler", "commit", ("--scheduler-cls", "acme")),
    "policy": ("scheduler", "SchedulingPolicy", "key", ("--scheduling-policy", "acme")),
    "executor": ("executor", "Executor", "submit", ("--distributed-executor-backend", "acme")),
}


def _chosen(site: Any, kind: str, constructor: str = "", method: str = "") -> tuple[Any, Any]:
    """Return the configuration that chooses a wrong plugin, and the plugins."""
    module, base, wrong, argv = KINDS[kind]
    source = WRONG.format(module=module, base=base, constructor=constructor or "...", method=method or wrong)
    site.install(
        Distribution(
            name="acme-dist",
            entry_points={f"ferrule.v1.{kind}": {"acme": "acme_wrong:Wrong"}},
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


@pytest.mark.parametrize("argv", [[], ["--plugins-allow", "acme-dist"], ["--plugin-config", "stat_logger:acme={}"]])
def test_a_broken_stat_logger_that_is_only_installed_is_a_warning(
    site: Any, caplog: pytest.LogCaptureFixture, argv: list[str]
) -> None:
    _chosen(site, "stat_logger")
    parsed = parse([str(tiny.path()), *argv])
    config, plugins = prepare(parsed.config, (), discover(), "launch")
    if argv:
        with pytest.raises(PluginError, match=r"stat_logger:acme of acme-dist 1\.0"):
            open_inputs(config, plugins)
        with pytest.raises(PluginError, match=r"stat_logger:acme of acme-dist 1\.0"):
            open_loggers(config, plugins, FakeEngine())
        return
    open_inputs(config, plugins)
    with caplog.at_level("WARNING"):
        titles = [title for title, _ in open_loggers(config, plugins, FakeEngine())]
    assert any("prometheus" in title for title in titles)
    assert not any("acme" in title for title in titles)
    assert "stat_logger:acme of acme-dist 1.0: Wrong.on_engine" in caplog.text
    assert "It is left out, because no option names it." in caplog.text


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
        ("polcy:fcfs={}", "'polcy' is not a kind of plugin. Did you mean 'policy'?"),
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
