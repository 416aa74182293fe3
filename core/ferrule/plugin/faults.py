"""Faults of plugins while they run: all of them look alike in the log, whatever the kind.

Where the core knows which plugin it calls, for a request or an event, it says so. An engine calls many plugins in a
step, some of them through objects that they made (a platform's memory, transfers, recorder); there the plugin is found
from the modules in the traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from ferrule import log
from ferrule.errors import FerruleError, PluginError, RequestFailed, StartupError
from ferrule.plugin.plugin_set import Plugins
from ferrule.plugin.refs import Origin, PluginRef

MAX_FAULTS = 3
_NAMED = 3  # plugins of one distribution that a message names

_logger = log.get("plugin")


def log_fault(title: str, doing: str, note: str = "") -> None:
    """Log the exception that is being handled, with its traceback. `title` is what `Plugins.title` says of the plugin,
    `doing` what it was called for: a method, a step, a route."""
    _logger.exception("plugin %s raised in %s%s", title, doing, note and f" ({note})")


class FaultCount:
    """A count of the faults of one plugin in this process; after `MAX_FAULTS` the plugin must not be called again."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.count = 0

    @property
    def disabled(self) -> bool:
        return self.count >= MAX_FAULTS

    def add(self, doing: str, consequence: str = "") -> None:
        """Log the exception that is being handled. `consequence` is added when the plugin gets disabled by it."""
        self.count += 1
        log_fault(self.title, doing, f"{self.count} of {MAX_FAULTS}")
        if self.count == MAX_FAULTS:
            _logger.error("plugin %s is disabled after %d faults%s", self.title, MAX_FAULTS, consequence)


@contextmanager
def failing_request(title: str, doing: str, *allowed: type[Exception]) -> Iterator[None]:
    """Wrap a plugin's work for one request: log an exception that it raises, and raise RequestFailed instead.

    A FerruleError of the plugin's own passes through, and so do the `allowed` exceptions.
    """
    try:
        yield
    except FerruleError:
        raise
    except Exception as error:
        if isinstance(error, allowed):
            raise
        log_fault(title, doing)
        raise RequestFailed("This request failed on the server.") from error


@contextmanager
def naming_culprit(plugins: Plugins) -> Iterator[None]:
    """Wrap the start of an engine, in which many plugins are called, so that an exception out of another distribution's
    code names its plugin. Raises PluginError, or the StartupError that was raised.
    """
    try:
        yield
    except StartupError as error:
        title = culprit(plugins, error, raiser=True)
        if title and title not in error.message:
            error.message = f"{title}: {error.message}"
        raise
    except FerruleError:
        raise
    except Exception as error:
        title = culprit(plugins, error)
        if not title:
            raise
        log_fault(title, "start-up")
        raise PluginError(f"Plugin {title} failed: {type(error).__name__}: {error}") from error


def fault_logger(plugins: Plugins, otherwise: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that logs the exception being handled as the fault of a plugin of another distribution.

    An exception that came out of Ferrule's own code is logged by `otherwise`. The argument of both functions says what
    was going on.
    """

    def write(doing: str) -> None:
        title = culprit(plugins, sys.exception())
        if title:
            log_fault(title, doing)
        else:
            otherwise(doing)

    return write


def culprit(plugins: Plugins, error: BaseException | None, *, raiser: bool = False) -> str:
    """Return the plugin of another distribution whose code an exception came out of, as logs and errors name it; "" for
    none.

    That is the plugin of the innermost frame that belongs to one; with `raiser`, of the innermost frame only. Several
    of one distribution are told apart by their modules and classes, where its frames name these.
    """
    frames = list(_frames(error.__traceback__ if error is not None else None))
    foreign = [ref for ref in plugins.refs if not ref.builtin]
    for place, (module, _) in enumerate(frames[:1] if raiser else frames):
        family = [ref for ref in foreign if _top(ref) == module.partition(".")[0]]
        if family:
            return _title(_narrowed(family, frames[place:]))
    return ""


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str]]:
    """Return (module, qualified name) of each frame, the innermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((str(trace.tb_frame.f_globals.get("__name__", "")), code.co_qualname))
        trace = trace.tb_next
    return reversed(found)


def _top(ref: PluginRef) -> str:
    """Return the top-level package of a plugin, or the name under which its file runs."""
    return ref.module if ref.origin is Origin.FILE else ref.module.partition(".")[0]


def _narrowed(family: list[PluginRef], frames: list[tuple[str, str]]) -> list[PluginRef]:
    """Return the plugins whose class, or else whose module, the innermost frame that names one belongs to; else all."""
    for module, qualname in frames:
        attribute = qualname.partition(".")[0]
        if exact := [ref for ref in family if ref.module == module and ref.attribute == attribute]:
            return exact
    for module, _ in frames:
        if near := [ref for ref in family if ref.module == module]:
            return near
    return family


def _title(refs: list[PluginRef]) -> str:
    ids = list(dict.fromkeys(ref.id for ref in refs))
    source = refs[0].source
    return f"{' or '.join(ids)} of {source}" if len(ids) <= _NAMED else source
