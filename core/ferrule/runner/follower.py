"""A thread that does one piece of work after another, and can be left behind in a piece that takes too long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ferrule.log import Log

_MOST_LEFT = 4  # threads that were left behind and still work, from which on new work waits
_LOWEST = 19  # priority of a thread that was left behind
_log = Log("grammar")

Item = tuple[bytes, Callable[[], None]]


class _Worker:
    """One thread on a queue. `key` and `began`, guarded by `lock`, describe the work that it is doing."""

    def __init__(self, items: SimpleQueue[Item | None], ended: Callable[[], None]) -> None:
        self._items = items
        self._ended = ended  # called when a thread that was left behind is done
        self.lock = threading.Lock()
        self.key: bytes | None = None
        self.began = 0.0  # what the thread had used of a processor
        self.left = False
        self.thread = threading.Thread(target=self._run, name="ferrule-grammar", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            key, work = item
            with self.lock:
                self.key, self.began = key, time.thread_time()
            try:
                work()
            except Exception:  # pieces of work handle what a plugin raises
                _log.exception("work on constraints failed")
            with self.lock:
                self.key = None
            if self.left:
                self._ended()
                return


class Follower:
    """A thread that does work in order. One thread submits work and abandons it.

    Work that runs for too long cannot be stopped, since it is in a library: `leave` lets its thread finish it, with the
    lowest priority, and another thread goes on with what comes after it. While several such threads work, `wait_room`
    blocks work that may become one more.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[Item | None] = SimpleQueue()
        self._room = threading.Condition()  # of the two that follow
        self._left = 0  # threads that were left behind and still work
        self._closed = False
        self._worker = _Worker(self._items, self._forget_left)

    def submit(self, key: bytes, work: Callable[[], None]) -> None:
        self._items.put((key, work))

    def overdue(self, seconds: float) -> bytes | None:
        """Return the key of the work that has used the processor for longer than `seconds`, or None."""
        worker = self._worker
        with worker.lock:
            if worker.key is None or worker.thread.ident is None:
                return None
            used = time.clock_gettime(time.pthread_getcpuclockid(worker.thread.ident))
            return worker.key if used - worker.began > seconds else None

    def leave(self, key: bytes) -> bool:
        """Abandon the thread that does the work of this key. Returns False when that has just been done."""
        worker = self._worker
        with worker.lock:
            if worker.key != key:
                return False
            worker.left = True
            with self._room:
                self._left += 1
        self._worker = _Worker(self._items, self._forget_left)
        if worker.thread.native_id is not None:
            try:
                os.setpriority(os.PRIO_PROCESS, worker.thread.native_id, _LOWEST)
            except OSError as error:  # it has ended since
                _log.debug("a thread that was left behind keeps its priority", error=str(error))
        return True

    def wait_room(self) -> None:
        """Wait until few abandoned threads still work, or the follower is closed. Any thread may call this."""
        with self._room:
            if not self._has_room():
                _log.warning("new constraints wait: others take too long to follow", threads=self._left)
                self._room.wait_for(self._has_room)

    def _has_room(self) -> bool:
        return self._closed or self._left < _MOST_LEFT

    def _forget_left(self) -> None:
        with self._room:
            self._left -= 1
            self._room.notify_all()

    def close(self) -> None:
        self._items.put(None)
        with self._room:
            self._closed = True
            self._room.notify_all()
