"""Reloads at SIGHUP the settings of a process that serves HTTP, without a restart."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ferrule import log
from ferrule.config import Config
from ferrule.errors import FerruleError

_logger = log.get("api")


class Reloads:
    """The settings that SIGHUP reloads: each component that can take new values registers what it reloads, and how.

    `apply` gets the present configuration, and takes the component's own part of it and of the files that it names. It
    changes nothing when it raises FerruleError, OSError or ValueError. An option whose value counts must also be in
    `ferrule.launch.reload.RELOADED`; a file's content, under an option that stays the same, need not.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, Callable[[Config], None]]] = []

    def add(self, what: str, apply: Callable[[Config], None]) -> None:
        self._entries.append((what, apply))

    @contextmanager
    def on_hangup(self, reread: Callable[[], Config]) -> Iterator[None]:
        """Reload at SIGHUP for the length of a block. `reread` raises FerruleError, OSError or ValueError."""

        def reload() -> None:
            try:
                self.run(reread())
            except (FerruleError, OSError, ValueError) as error:
                _logger.error("SIGHUP: nothing is reloaded: %s", error)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reload)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def run(self, config: Config) -> None:
        """Reload everything; the log says what was reloaded, and what stays as it was and why."""
        done = []
        for what, apply in self._entries:
            try:
                apply(config)
            except (FerruleError, OSError, ValueError) as error:
                _logger.error("SIGHUP: %s stay as they were: %s", what, error)
            else:
                done.append(what)
        _logger.info("SIGHUP: reloaded %s", ", ".join(done))
