"""The stat loggers of a process, guarded against their exceptions: those that receive its figures, and those that show
the figures of other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ferrule import log
from ferrule.client.base import EngineClient
from ferrule.config import Resolved, StatSettings
from ferrule.errors import StartupError
from ferrule.hooks import HookRunner
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.stats import StatLogger
from ferrule.plugin.faults import FaultCount
from ferrule.types import ModelInfo

_logger = log.get("plugin")


class Loggers:
    """The stat loggers of a process, with their titles. An exception of a logger is logged, and after three the logger
    is disabled.

    With `silent`, loggers are told of HTTP and stalls alone.
    """

    def __init__(
        self, loggers: Sequence[tuple[str, StatLogger]], hooks: HookRunner | None = None, silent: bool = False
    ) -> None:
        self.hooks = hooks or HookRunner()
        self._silent = silent
        self._loggers = [(FaultCount(title), logger) for title, logger in loggers]

    def tell(self, event: str, *told: Any, always: bool = False) -> list[Any]:
        """Call the method `event` of each logger with what it is `told`, and return what those return that do not
        fail.
        """
        found = []
        for faults, logger in self._loggers if always or not self._silent else ():
            if not faults.disabled:
                try:
                    found.append(getattr(logger, event)(*told))
                except Exception:
                    faults.add(event)
        return found

    def exposition(self) -> tuple[str, str]:
        """Return the metrics of all loggers that use the first one's media type, and those of hooks."""
        found = [text for text in self.tell("exposition", always=True) if text is not None]
        media_type = found[0][0] if found else "text/plain; charset=utf-8"
        kind = media_type.partition(";")[0]
        texts = [text for other, text in found if other.partition(";")[0] == kind]
        return media_type, "".join(texts) + self.hooks.metrics()


def open_loggers(config: Resolved, plugins: Plugins, client: EngineClient) -> list[tuple[str, StatLogger]]:
    """Open all stat loggers that are installed; return them with their titles. Raises PluginError, ConfigError: see
    `_optional`.
    """
    loggers: list[tuple[str, StatLogger]] = []
    for name in plugins.defaults("stat_logger"):
        with _optional(plugins, name):
            logger: StatLogger = plugins.make("stat_logger", name, StatSettings.of(config), client.info)
            if client.board.shared is not None:
                with plugins.blamed("stat_logger", name):
                    logger.share(*client.board.shared)
            loggers.append((plugins.title("stat_logger", name), logger))
    return loggers


def open_followers(config: Resolved, plugins: Plugins, info: ModelInfo, folder: Path) -> Loggers | None:
    """Open loggers that show what the processes that share `folder` were told; None when one that shows something
    cannot.

    Raises PluginError, ConfigError: see `_optional`.
    """
    shown: list[str] = []
    for name in plugins.defaults("stat_logger"):
        with _optional(plugins, name):
            kind: type[StatLogger] = plugins.load("stat_logger", name)
            if kind.exposition is StatLogger.exposition:
                continue
            if kind.follow is StatLogger.follow:
                return None
            shown.append(name)
    loggers: list[tuple[str, StatLogger]] = []
    for name in shown:
        with _optional(plugins, name):
            logger = plugins.make("stat_logger", name, StatSettings.of(config), info)
            with plugins.blamed("stat_logger", name):
                logger.follow(folder)
            loggers.append((plugins.title("stat_logger", name), logger))
    return Loggers(loggers)


@contextmanager
def _optional(plugins: Plugins, name: str) -> Iterator[None]:
    """Guard the start of a stat logger. A broken one that is only installed is left out, with a warning; errors of one
    that is built in, or that the user has named, are raised.
    """
    try:
        yield
    except StartupError as error:
        if plugins.is_builtin("stat_logger", name) or plugins.is_named("stat_logger", name):
            raise
        _logger.warning("%s It is left out, because no option names it.", " ".join(str(error).split("\n")))
