"""Sleep: what the model occupies is given back between steps, and restored when it is wanted again.

No copy of the weights is kept, waking reads the checkpoint again: on a CPU a copy would occupy the memory that sleep is
meant to free. Requests that were running wait and are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ferrule.errors import ForbiddenError, RequestError
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.scheduler import Scheduler

PARTS = ("weights", "kv_cache")


class Sleep:
    """`level` is 0 while all parts are there; above it, no step may begin.

    It changes only when the executor has done what was asked, so a call that failed can be repeated.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float], enabled: bool) -> None:
        self.level = 0
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._enabled = enabled
        self._gone: tuple[str, ...] = ()  # parts that were given back

    def begin(self, level: int = 1) -> None:
        """Put running requests back into the queue, and release the device's memory.

        After waking, the requests are recomputed, with the same output. Raises RequestError when this is not possible,
        or for a level that does not exist.
        """
        self._check_enabled()
        if level not in (1, 2):
            raise RequestError("level must be 1 or 2.", "level")
        if not self.level and not self._scheduler.evacuate(self._clock()):
            raise RequestError("Requests run, and this scheduler cannot take them back: sleep when there are none.")
        self._executor.call("release", (PARTS, level))
        self._gone, self.level = PARTS, max(self.level, level)

    def end(self, tags: Sequence[str] | None = None) -> None:
        """Restore the parts that `tags` name; without any, all. Raises RequestError, StartupError."""
        self._check_enabled()
        if any(tag not in PARTS for tag in tags or ()):
            raise RequestError(f"tags must be among {', '.join(PARTS)}.", "tags")
        for part in [part for part in self._gone if part in (tags or PARTS)]:
            self._executor.call("restore", (part,))
            self._gone = tuple(other for other in self._gone if other != part)
        self.level = self.level if self._gone else 0

    def _check_enabled(self) -> None:
        if not self._enabled:
            raise ForbiddenError("This server cannot sleep: start it with --enable-sleep-mode.")
