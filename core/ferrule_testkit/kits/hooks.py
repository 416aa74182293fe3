"""The kit of hooks plugins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ferrule.config import Config
from ferrule.config.resolve import resolve
from ferrule.errors import OverloadedError, nearest
from ferrule.hooks import HookRunner
from ferrule.interfaces.hooks import AccessRequest, Arrival, Hooks
from ferrule.interfaces.stats import RequestStats
from ferrule.sampling_params import SamplingParams
from ferrule.types import EngineStats, FinishReason
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.kits.count import work

_MOST_WORK = 50_000  # lines of Python for one call
_RESERVED = ("vllm:", "http_request", "process_", "python_")

ACCESSES = (
    AccessRequest("GET", "/v1/models", {}),
    AccessRequest("POST", "/v1/chat/completions", {"authorization": "Bearer k", "content-type": "x"}, "127.0.0.1"),
    AccessRequest("BREW", "/" + "x" * 3000, {"authorization": "\xff\x00"}, "::1"),
    AccessRequest("GET", "", {"": ""}),
    AccessRequest("GET", "/%00%ff/..//", {f"h{n}": "v" * 100 for n in range(100)}),
)
_ARRIVAL = Arrival(at=1.0, headers={"traceparent": "\xff-", "x": ""}, num_choices=1, read_from=1.0, submitted=2.0)
_STATS = RequestStats(
    finish=FinishReason.ABORT,
    prompt_tokens=3,
    generation_tokens=0,
    cached_tokens=0,
    max_tokens=5,
    n=1,
    time_to_first_token=0.0,
    end_to_end=0.1,
    queue_time=0.0,
    inference_time=0.0,
    prefill_time=0.0,
    decode_time=0.0,
)


class HooksKit(Kit):
    """Hooks get every event, return the declared types, and do not delay the server."""

    kind = "hooks"

    def make(self) -> Hooks:
        hooks: Hooks = self.new()
        return hooks

    # ------------------------------------------------------------------------------------ promises

    def test_it_is_made_without_arguments(self) -> None:
        """Make an instance without arguments, a separate one in every process."""
        promise(self.make() is not self.make(), "two processes in one would share an instance")

    def test_signatures_fit(self) -> None:
        """Declare only parameters that the hook has; some may be left out."""
        HookRunner([("the plugin", self.make())])

    def test_no_hook_is_misspelt(self) -> None:
        """Have no method whose name is nearly a hook's: nothing would ever call it."""
        known = [name for name, _ in inspect.getmembers(Hooks, inspect.isfunction) if not name.startswith("_")]
        for name, _ in inspect.getmembers(self.plugin, inspect.isfunction):
            if name not in known and not name.startswith("_"):
                promise(not nearest(name, known), f"{name} is not a hook.{nearest(name, known)}")

    def test_it_hears_everything(self) -> None:
        """Accept every event, in any order and repeatedly, without raising."""
        runner = HookRunner([("the plugin", self.make())])
        for _ in range(3):
            for name, tell in _EVENTS.items():
                tell(runner)
                promise(not runner.failures, f"{name} raises or answers in another type; the log says what")

    def test_access_is_decided_in_one_word(self) -> None:
        """Return True, False or None from `authorise` for any call, odd ones included, and the same when asked
        again.
        """
        hooks = self.make()
        for access in ACCESSES:
            first, again = hooks.authorise(access), hooks.authorise(access)
            promise(first in (True, False, None), f"authorise gives {shown(first)} for {shown(access)}")
            promise(first is None or isinstance(first, bool), f"authorise gives {shown(first)}")
            promise(type(first) is type(again), f"authorise gives {first} and then {again} for one call")

    def test_figures_can_be_read(self) -> None:
        """Add Prometheus text with `register_metrics`, under names that are not the server's."""
        if self.plugin.register_metrics is Hooks.register_metrics:
            does_not_apply("it has no figures")
        for _ in range(2):  # each server has a registry of its own
            registry = CollectorRegistry()
            self.make().register_metrics(registry)
            for family in text_string_to_metric_families(generate_latest(registry).decode()):
                promise(not family.name.startswith(_RESERVED), f"{family.name} is a name of the server's")

    def test_it_does_little(self) -> None:
        """Run a bounded amount of code for an event: hooks run on the thread that does the work."""
        runner = HookRunner([("the plugin", self.make())])
        for name, tell in _EVENTS.items():
            tell(runner)
            lines = work(lambda tell=tell: tell(runner))  # type: ignore[misc]
            promise(lines <= _MOST_WORK, f"{name} runs {lines} lines of Python")


_EVENTS: Mapping[str, Callable[[HookRunner], Any]] = {
    "process_started": lambda runner: runner.process_started("api-0", resolve(Config())),
    "report_header": lambda runner: runner.report_header(resolve(Config())),
    "register_metrics": lambda runner: runner.register_metrics(),
    "request_admitted": lambda runner: runner.request_admitted("r1", "m", 3, SamplingParams(), _ARRIVAL),
    "request_refused": lambda runner: runner.request_refused("m", OverloadedError("full"), _ARRIVAL),
    "request_finished": lambda runner: runner.request_finished("r1", _STATS),
    "request_finished of a stranger": lambda runner: runner.request_finished("r2", _STATS),
    "step_stats": lambda runner: runner.step_stats(EngineStats(), 0),
    "authorise": lambda runner: runner.authorise(ACCESSES[1]),
    "metrics": lambda runner: runner.metrics(),
    "process_stopping": lambda runner: runner.process_stopping("api-0", 0),
}
