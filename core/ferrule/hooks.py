"""Telling hooks plugins, each behind a guard. The only user of pluggy.

pluggy keeps the registry, calls in a defined order and lets an implementation leave out parameters. The guard is ours:
one plugin's exception must reach neither the caller nor the next plugin.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from ferrule.config import ServerSettings
from ferrule.errors import PluginError, StartupError
from ferrule.interfaces.hooks import AccessRequest, Arrival, Hooks
from ferrule.interfaces.plugins import Plugins
from ferrule.plugin.faults import FaultCount

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ferrule.config import Config, Resolved
    from ferrule.errors import FerruleError
    from ferrule.interfaces.stats import RequestStats
    from ferrule.sampling_params import SamplingParams
    from ferrule.types import EngineStats

_PROJECT = "ferrule"
_HOOK_NAMES = tuple(name for name, _ in inspect.getmembers(Hooks, inspect.isfunction) if not name.startswith("_"))
_impl = pluggy.HookimplMarker(_PROJECT)

# Of the HTTP call that is being served, with lower-case names. As `CALLER`, it is found and not passed.
HEADERS: ContextVar[Mapping[str, str]] = ContextVar("headers", default=MappingProxyType({}))


class _Manager(pluggy.PluginManager):
    """A pluggy manager whose specifications are the methods of `Hooks`: the contract needs no pluggy."""

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> pluggy.HookspecOpts | None:
        if name not in _HOOK_NAMES:
            return None
        return pluggy.HookspecOpts(
            firstresult=name == "authorise", historic=False, warn_on_impl=None, warn_on_impl_args=None
        )


class HookRunner:
    """A caller of every hooks plugin, the first of the set first; with none it does nothing. Methods as in `Hooks`."""

    def __init__(self, plugins: Sequence[tuple[str, Hooks]] = ()) -> None:
        """Register the plugins' instances, each with its title for the log. Raises PluginError."""
        self._manager = _Manager(_PROJECT)
        self._manager.add_hookspecs(Hooks)
        self._guards = [_Guard(title, hooks) for title, hooks in plugins]
        for guard in reversed(self._guards):  # pluggy calls the last registered first
            try:
                self._manager.register(guard, guard.title)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"Plugin {guard.title} does not fit the hooks: {error}") from error

    @property
    def failures(self) -> Mapping[str, int]:
        """The number of exceptions of each plugin that raised any, by its title."""
        return {guard.title: guard.faults.count for guard in self._guards if guard.faults.count}

    def process_started(self, process: str, config: Resolved) -> None:
        self._manager.hook.process_started(process=process, config=ServerSettings.of(config))

    def process_stopping(self, process: str, status: int) -> None:
        self._manager.hook.process_stopping(process=process, status=status)

    def request_refused(self, model: str, error: FerruleError, arrival: Arrival) -> None:
        self._manager.hook.request_refused(model=model, error=error, arrival=arrival)

    def request_admitted(
        self, request_id: str, model: str, prompt_tokens: int, params: SamplingParams | None, arrival: Arrival
    ) -> None:
        self._manager.hook.request_admitted(
            request_id=request_id, model=model, prompt_tokens=prompt_tokens, params=params, arrival=arrival
        )

    def request_finished(self, request_id: str, stats: RequestStats) -> None:
        self._manager.hook.request_finished(request_id=request_id, stats=stats)

    def step_stats(self, stats: EngineStats, engine: int) -> None:
        self._manager.hook.step_stats(stats=stats, engine=engine)

    def authorise(self, access: AccessRequest) -> bool | None:
        verdict = self._manager.hook.authorise(access=access)
        return None if verdict is None else verdict is True

    def register_metrics(self) -> None:
        """Give each plugin that wants one a registry of its own: a broken collector spoils no other's figures."""
        for guard in self._guards:
            guard.open_metrics()

    def metrics(self) -> str:
        """Return the plugins' figures in Prometheus' text format, to follow the server's own."""
        return "".join(guard.metrics() for guard in self._guards)

    def report_header(self, config: Resolved) -> Sequence[str]:
        return [line for lines in self._manager.hook.report_header(config=ServerSettings.of(config)) for line in lines]


def open_hooks(plugins: Plugins, config: Config | None = None) -> HookRunner:
    """Load the hooks plugins that are on. All of them were asked for, so a broken one is a PluginError.

    A plugin that states ``only_with`` is on where `config` has a value for that option.
    """
    given = None if config is None else config.observability
    options = {name: plugins.stated("hooks", name, "only_with") for name in plugins.names("hooks")}
    names = [name for name, option in options.items() if option is None or getattr(given, option, None)]
    return HookRunner([(plugins.title("hooks", name), plugins.make("hooks", name)) for name in names])


class _Guard:
    """One plugin as pluggy sees it: the hooks that it overrides, each behind `_guarded`."""

    def __init__(self, title: str, hooks: Hooks) -> None:
        self.title = title
        self.faults = FaultCount(title)
        self._registry: CollectorRegistry | None = None
        for name in _HOOK_NAMES:
            if getattr(type(hooks), name) is not getattr(Hooks, name):
                setattr(self, name, _impl(self._guarded(name, getattr(hooks, name))))

    def open_metrics(self) -> None:
        register: Callable[[CollectorRegistry], None] | None = getattr(self, "register_metrics", None)
        if register is not None:
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()
            register(self._registry)

    def metrics(self) -> str:
        if self._registry is None or self.faults.disabled:
            return ""
        from prometheus_client import generate_latest

        try:
            return str(generate_latest(self._registry), "utf-8")
        except Exception:
            self._failed("a collector of metrics")
            return ""

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            if not self.faults.disabled:
                try:
                    return _checked(name, method(*args))
                except (Exception, SystemExit) as error:
                    if name == "process_started" and isinstance(error, StartupError):
                        raise
                    self._failed(name)
            return False if name == "authorise" else None

        return call

    def _failed(self, name: str) -> None:
        closed = ", and refuses every call that it is asked to authorise" if hasattr(self, "authorise") else ""
        self.faults.add(name, closed)


def _checked(name: str, result: Any) -> Any:
    """Return a hook's result, if it is of the hook's type. Raises TypeError."""
    if name == "authorise" and not (result is None or isinstance(result, bool)):
        raise TypeError(f"authorise returned {type(result).__name__}, not a bool or None")
    if name == "report_header":
        if isinstance(result, str) or not all(isinstance(line, str) for line in result):
            raise TypeError("report_header returned something else than a sequence of lines")
        return list(result)
    return result
