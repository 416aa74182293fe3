"""Asking the executor whether its workers live, while the loop waits for a step, for messages, or for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ferrule.engine.loop import EngineLoop
from ferrule.interfaces.executor import Executor

SECONDS = 1.0  # between two questions
PATIENCE = 5.0  # seconds that the loop has to end by itself, with what its step raises


class HealthWatch:
    """A thread that calls the executor's `check_health` regularly, so that an executor that is slow to answer delays no
    step.

    Whatever exception the check raises ends the loop at its next turn. A loop that waits for a dead worker takes no
    next turn: then `stuck` is called.
    """

    def __init__(self, loop: EngineLoop, executor: Executor, seconds: float = SECONDS, patience: float = PATIENCE):
        self._loop = loop
        self._executor = executor
        self._seconds = seconds
        self._patience = patience
        self._ended = threading.Event()

    def begin(self, stuck: Callable[[], None]) -> None:
        threading.Thread(target=self._watch, args=(stuck,), name="health", daemon=True).start()

    def end(self) -> None:
        """Stop asking. Called before the executor is shut down, after which its answers mean nothing."""
        self._ended.set()

    def _watch(self, stuck: Callable[[], None]) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._executor.check_health()
            except Exception as error:
                if self._ended.is_set():
                    return
                self._loop.fail(error)
                if not self._ended.wait(self._patience):
                    stuck()
                return
