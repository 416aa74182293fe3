"""The stat loggers of a process: those that are told what happens, and those that show what others were told."""

from __future__ import annotations

from pathlib import Path

from ferrule.client.base import EngineClient
from ferrule.config import Resolved
from ferrule.frontend.admission.ledger import Loggers
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.stats import StatLogger
from ferrule.types import ModelInfo


def open_loggers(config: Resolved, plugins: Plugins, client: EngineClient) -> list[tuple[str, StatLogger]]:
    """All that are installed, with their titles. Raises PluginError."""
    loggers: list[tuple[str, StatLogger]] = []
    for name in plugins.defaults("stat_logger"):
        logger: StatLogger = plugins.make("stat_logger", name, config, client.info)
        if client.board.shared is not None:
            with plugins.blamed("stat_logger", name):
                logger.share(*client.board.shared)
        loggers.append((plugins.title("stat_logger", name), logger))
    return loggers


def open_followers(config: Resolved, plugins: Plugins, info: ModelInfo, folder: Path) -> Loggers | None:
    """Loggers that show what those that share `folder` were told; None when one that shows something cannot.

    Raises PluginError.
    """
    shown: list[str] = []
    for name in plugins.defaults("stat_logger"):
        kind: type[StatLogger] = plugins.load("stat_logger", name)
        if kind.exposition is StatLogger.exposition:
            continue
        if kind.follow is StatLogger.follow:
            return None
        shown.append(name)
    loggers = [(plugins.title("stat_logger", name), plugins.make("stat_logger", name, config, info)) for name in shown]
    for (_, logger), name in zip(loggers, shown, strict=True):
        with plugins.blamed("stat_logger", name):
            logger.follow(folder)
    return Loggers(loggers)
