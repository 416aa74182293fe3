"""Hooks: off until named, guarded, counted, disabled after three failures, and closed where they decide."""

from __future__ import annotations

import logging

import pytest

from ferrule.config import Config, ObservabilityConfig
from ferrule.errors import ConfigError, PluginError
from ferrule.hooks import HookRunner, open_hooks
from ferrule.interfaces.hooks import AccessRequest, Arrival
from ferrule.plugin.faults import MAX_FAULTS
from ferrule.sampling_params import SamplingParams
from ferrule.types import EngineStats
from tools.wheels import Distribution

HEARS = """
from ferrule.interfaces.hooks import Hooks

class Mine(Hooks):
    def __init__(self):
        self.heard = []

    def request_admitted(self, request_id, prompt_tokens):
        self.heard.append((request_id, prompt_tokens))

    def report_header(self, config):
        return [f"heard {len(self.heard)}"]
"""

RAISES = """
from ferrule.interfaces.hooks import Hooks

class Mine(Hooks):
    def step_stats(self, stats, engine):
        raise {what}
"""

ACCESS = AccessRequest("GET", "/v1/models", {})


def hooks_dist(name: str, source: str) -> Distribution:
    module = name.replace("-", "_") + "_module"
    return Distribution(
        name=name, entry_points={"ferrule.v1.hooks": {name: f"{module}:Mine"}}, files={f"{module}.py": source}
    )


def authoriser(answer: str) -> str:
    return (
        "from ferrule.interfaces.hooks import Hooks\n"
        f"class Mine(Hooks):\n    def authorise(self, access):\n        {answer}\n"
    )


def tell(hooks: HookRunner) -> None:
    hooks.step_stats(EngineStats(), 0)


def admit(hooks: HookRunner) -> None:
    hooks.request_admitted("r1", "m", 7, SamplingParams(), Arrival(at=1.0, headers={}))


def test_with_no_plugin_nothing_happens_and_nothing_is_decided():
    hooks = HookRunner()
    hooks.process_started("api-0", Config())
    hooks.process_stopping("api-0", 0)
    hooks.register_metrics()
    assert hooks.metrics() == ""
    hooks.request_finished("r1", None)
    admit(hooks)
    tell(hooks)
    assert hooks.authorise(ACCESS) is None
    assert list(hooks.report_header(Config())) == []
    assert hooks.failures == {}


def test_hooks_of_strangers_are_off_until_named(site):
    site.install(hooks_dist("hook-dist", HEARS))
    assert "hook-dist" not in site.discover().names("hooks")
    with pytest.raises(PluginError, match="hooks are off until"):
        site.discover().load("hooks", "hook-dist")
    assert "hook-dist" in site.discover(plugins_allow=("hook-dist",)).names("hooks")
    assert "hook-dist" in site.discover(allowed=["hook-dist"]).names("hooks")
    assert "hook-dist" not in site.discover(allowed=["hook-dist"], plugins_deny=("hook-dist",)).names("hooks")


def test_a_named_hook_hears_and_may_leave_out_parameters(site):
    site.install(hooks_dist("hook-dist", HEARS))
    hooks = open_hooks(site.discover(plugins_allow=("hook-dist",)))
    admit(hooks)
    assert hooks.report_header(Config()) == ["heard 1"]


def test_hooks_from_a_file_are_on(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEARS)
    hooks = open_hooks(site.discover(plugin=(f"hooks={file}",)))
    assert hooks.report_header(Config()) == ["heard 0"]


@pytest.mark.parametrize("what", ["ValueError('ouch')", "SystemExit(1)"])
def test_a_hook_that_raises_is_logged_counted_and_disabled_after_three(site, caplog, what):
    site.install(hooks_dist("loud-dist", RAISES.format(what=what)), hooks_dist("good-dist", HEARS))
    hooks = open_hooks(site.discover(plugins_allow=("loud-dist", "good-dist")))
    with caplog.at_level(logging.ERROR, "ferrule.plugin"):
        for _ in range(MAX_FAULTS + 2):
            tell(hooks)
    assert hooks.failures == {"hooks:loud-dist of loud-dist 1.0": MAX_FAULTS}
    raised = [record for record in caplog.records if "raised in step_stats" in record.getMessage()]
    assert len(raised) == MAX_FAULTS
    assert "loud-dist 1.0" in raised[0].getMessage()
    assert "is disabled" in caplog.text
    admit(hooks)
    assert hooks.report_header(Config()) == ["heard 1"], "the neighbour still works"


@pytest.mark.parametrize(("answer", "verdict"), [("return True", True), ("return False", False), ("pass", None)])
def test_authorise_takes_the_first_answer(site, answer, verdict):
    site.install(hooks_dist("a-dist", authoriser("pass")), hooks_dist("b-dist", authoriser(answer)))
    site.install(hooks_dist("c-dist", authoriser("return None")))
    hooks = open_hooks(site.discover(plugins_allow=("a-dist", "b-dist", "c-dist")))
    assert hooks.authorise(ACCESS) is verdict


def test_the_first_plugin_of_the_set_decides(site):
    site.install(hooks_dist("a-dist", authoriser("return False")), hooks_dist("b-dist", authoriser("return True")))
    hooks = open_hooks(site.discover(plugins_allow=("a-dist", "b-dist")))
    assert hooks.authorise(ACCESS) is False


@pytest.mark.parametrize("answer", ["raise ValueError", "return 1", "return 'yes'"])
def test_authorise_fails_closed_and_stays_closed(site, answer):
    site.install(hooks_dist("a-dist", authoriser(answer)))
    hooks = open_hooks(site.discover(plugins_allow=("a-dist",)))
    assert [hooks.authorise(ACCESS) for _ in range(MAX_FAULTS + 2)] == [False] * (MAX_FAULTS + 2)


COUNTS = """
from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from ferrule.interfaces.hooks import Hooks

class Mine(Hooks):
    def register_metrics(self, registry):
        self.admitted = Counter("{name}_admitted", "Requests.", registry=registry)
        registry.register(self)

    def request_admitted(self):
        self.admitted.inc()

    def describe(self):
        return []

    def collect(self):
        {body}
        yield GaugeMetricFamily("{name}_open", "Open.", 3)
"""


def test_metrics_of_plugins_follow_and_a_broken_collector_spoils_no_other(site):
    site.install(
        hooks_dist("good-dist", COUNTS.format(name="good", body="pass")),
        hooks_dist("odd-dist", COUNTS.format(name="odd", body="raise ValueError('no figures')")),
    )
    hooks = open_hooks(site.discover(plugins_allow=("good-dist", "odd-dist")))
    assert hooks.metrics() == ""
    hooks.register_metrics()
    admit(hooks)
    for _ in range(MAX_FAULTS + 1):
        text = hooks.metrics()
    assert "good_admitted_total 1.0" in text
    assert "good_open 3.0" in text
    assert "odd" not in text
    assert hooks.failures == {"hooks:odd-dist of odd-dist 1.0": MAX_FAULTS}


def test_report_header_must_be_lines(site):
    source = HEARS.replace('return [f"heard {len(self.heard)}"]', "return 'one text'")
    site.install(hooks_dist("a-dist", source))
    hooks = open_hooks(site.discover(plugins_allow=("a-dist",)))
    assert hooks.report_header(Config()) == []
    assert list(hooks.failures.values()) == [1]


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("import nothing_like_this", "nothing_like_this"),
        (HEARS.replace("self.heard = []", "raise RuntimeError('not today')"), "not today"),
        (HEARS.replace("prompt_tokens)", "prompt_token)", 1), "prompt_token"),
    ],
)
def test_a_named_hooks_plugin_that_is_broken_stops_start_up(site, source, part):
    site.install(hooks_dist("bad-dist", source))
    with pytest.raises(PluginError, match="bad-dist 1.0") as caught:
        open_hooks(site.discover(plugins_allow=("bad-dist",)))
    assert part in str(caught.value)


def test_hooks_that_need_an_option_are_imported_with_it_alone(site):
    source = "raise ImportError('imported')\nfrom ferrule.interfaces.hooks import Hooks\n\n\nclass Mine(Hooks):\n"
    site.install(hooks_dist("needy-dist", source + "    only_with = 'otlp_traces_endpoint'\n"))
    plugins = site.discover(plugins_allow=("needy-dist",))
    admit(open_hooks(plugins, Config()))
    with pytest.raises(PluginError, match="imported"):
        open_hooks(plugins, Config(observability=ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:1")))


def test_a_hook_can_stop_the_start_and_nothing_later(site):
    source = (
        "from ferrule.errors import ConfigError\nfrom ferrule.interfaces.hooks import Hooks\n\n\nclass Mine(Hooks):\n"
        "    def process_started(self, process, config):\n        raise ConfigError('wrong')\n\n"
        "    def step_stats(self, stats, engine):\n        raise ConfigError('wrong')\n"
    )
    site.install(hooks_dist("stop-dist", source))
    hooks = open_hooks(site.discover(plugins_allow=("stop-dist",)))
    with pytest.raises(ConfigError, match="wrong"):
        hooks.process_started("launcher", Config())
    tell(hooks)
    assert list(hooks.failures.values()) == [1]
