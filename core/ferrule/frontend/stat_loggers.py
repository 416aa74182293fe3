"""The stat loggers of a process: those that receive its figures, and those that show the figures of other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ferrule import log
from ferrule.client.base import EngineClient
from ferrule.config import Resolved, StatSettings
from ferrule.errors import StartupError
from ferrule.frontend.metrics import Loggers
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.stats import StatLogger
from ferrule.types import ModelInfo

_logger = log.get("plugin")


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
