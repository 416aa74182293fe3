"""`Loggers`: the stat loggers of a process, guarded against their exceptions, and the metrics that they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ferrule.hooks import HookRunner
from ferrule.interfaces.stats import StatLogger
from ferrule.plugin.faults import FaultCount


class Loggers:
    """Stat loggers with their titles. An exception of a logger is logged, and after three the logger is disabled.

    With `silent`, loggers are told of HTTP alone.
    """

    def __init__(
        self, loggers: Sequence[tuple[str, StatLogger]], hooks: HookRunner | None = None, silent: bool = False
    ) -> None:
        self.hooks = hooks or HookRunner()
        self._silent = silent
        self._loggers = [(FaultCount(title), logger) for title, logger in loggers]

    def tell(self, event: str, say: Callable[[StatLogger], None], always: bool = False) -> None:
        """Call `say` with each logger; `event` is the method that `say` calls, for the log."""
        for faults, logger in self._loggers if always or not self._silent else ():
            if faults.disabled:
                continue
            try:
                say(logger)
            except Exception:
                faults.add(event)

    def exposition(self) -> tuple[str, str]:
        """Return the metrics of all loggers that use the first one's media type, and those of hooks."""
        found: list[tuple[str, str]] = []

        def ask(logger: StatLogger) -> None:
            text = logger.exposition()
            if text is not None:
                found.append(text)

        self.tell("exposition", ask, always=True)
        media_type = found[0][0] if found else "text/plain; charset=utf-8"
        kind = media_type.partition(";")[0]
        texts = [text for other, text in found if other.partition(";")[0] == kind]
        return media_type, "".join(texts) + self.hooks.metrics()
