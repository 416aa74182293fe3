"""`LoopThread`: an event loop on a thread of its own, and what is open on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ferrule.errors import EngineDead

T = TypeVar("T")
_CLOSED = "This LLM was closed. Make another one to go on."


class LoopThread:
    """A thread with an event loop. `wait`, `submit`, `post` and `close` may be called from any other thread; what they
    are given runs on the loop.
    """

    def __init__(self, name: str) -> None:
        self.opened = AsyncExitStack()  # what `close` closes on the loop, last first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._ending = threading.Lock()  # held by `close` from its beginning to its end
        self._closing = threading.Lock()  # so that nothing is posted to a loop that is closed
        self._closed = False
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Raises EngineDead after `close`."""
        if self._closed:
            work.close()
            raise EngineDead(_CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs on the loop, and is cancelled when the wait for it is interrupted.

        Raises EngineDead after `close`, and when another thread closes while this one waits.
        """
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise EngineDead(_CLOSED) from None
        finally:
            future.cancel()  # after a KeyboardInterrupt; otherwise it is over already

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop soon; after `close` the call is dropped."""
        with self._closing:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Close what is open, and end the thread; idempotent. A second caller waits for the first."""
        with self._ending:
            if self._closed:
                return
            try:
                self.wait(self._end())
            finally:
                with self._closing:
                    self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def abandon(self) -> None:
        """Close what the owner left open. This runs on the thread that dropped the last reference to the owner, which
        may be the loop's own.

        The main thread waits until all is closed. The memory is then free for what comes next; and at the end of the
        program no thread still computes, which would abort the process while the interpreter shuts down.
        """
        if not self._thread.is_alive():  # in a child that was forked, too
            return
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close, name=f"{self._thread.name}-end", daemon=False).start()

    async def _end(self) -> None:
        try:
            await self.opened.aclose()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}  # what other threads wait for: it is cancelled
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
