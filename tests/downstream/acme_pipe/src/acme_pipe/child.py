"""The child: it answers what comes through its standard input, until that ends.

One thread reads, the worker's thread computes, and one waits for the results that were asked for.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO

import msgspec

from acme_pipe.frames import METHODS, Ask, Fault, Given, Reply, read, write
from ferrule import log
from ferrule.errors import EngineDead, RequestError
from ferrule.execution import WorkerThread, open_worker
from ferrule.interfaces.executor import Step
from ferrule.types import ModelInfo, Need, StepPlan


class Child:
    """A worker's thread, and the steps whose results were not asked for yet."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._writing = threading.Lock()
        self._thread: WorkerThread | None = None
        self._steps: dict[int, Callable[[], Any]] = {}
        self._awaited: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()

    def serve(self, stream: BinaryIO) -> None:
        """Answer until the parent closes its end, or dies."""
        waiter = threading.Thread(target=self._wait, name="acme-results")
        waiter.start()
        while (frame := read(stream)) is not None:
            ask = msgspec.msgpack.decode(frame, type=Ask)
            argument = msgspec.msgpack.decode(ask.argument, type=METHODS[ask.method][0])
            getattr(self, f"on_{ask.method}")(ask.number, argument)
        self._awaited.put(None)
        if self._thread is not None:
            self._thread.shutdown()
        waiter.join()

    def on_check(self, number: int, given: Given) -> None:
        self._answer(number, lambda: WorkerThread(open_worker(*given)).check())

    def on_start(self, number: int, given: Given) -> None:
        self._answer(number, lambda: self._start(given))

    def on_init_cache(self, number: int, num_blocks: int) -> None:
        self._answer(number, lambda: self._started().init_cache(num_blocks))

    def on_submit(self, number: int, plan: StepPlan) -> None:
        try:
            step: Step = self._started().submit(plan)
        except EngineDead as error:  # told when the result is asked for
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._steps[number] = failed.result
        else:
            self._steps[number] = step.result

    def on_result(self, number: int, submitted: int) -> None:
        self._awaited.put((number, self._steps.pop(submitted)))

    def on_expect(self, number: int, backend: str) -> None:
        self._started().expect(backend)

    def on_prepare(self, number: int, need: Need) -> None:
        try:
            loading = self._started().prepare(need)
        except (EngineDead, RequestError) as error:
            loading = Future()
            loading.set_exception(error)
        loading.add_done_callback(lambda future: self._answer(number, future.result))

    def on_call(self, number: int, call: tuple[str, tuple[Any, ...]]) -> None:
        self._answer(number, lambda: self._started().call(*call))

    def _start(self, given: Given) -> ModelInfo:
        self._thread = WorkerThread(open_worker(*given))
        return self._thread.start()

    def _started(self) -> WorkerThread:
        if self._thread is None:
            raise EngineDead("the child has no model")
        return self._thread

    def _wait(self) -> None:
        while (awaited := self._awaited.get()) is not None:
            self._answer(*awaited)

    def _answer(self, number: int, function: Callable[[], Any]) -> None:
        try:
            answer = Reply(number, msgspec.Raw(msgspec.msgpack.encode(function())))
        except Exception as error:
            answer = Reply(number, fault=Fault.of(error))
        with self._writing:
            write(self._out, answer)


def main() -> None:
    log.setup("INFO", "acme-worker")
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not an answer
    Child(out).serve(sys.stdin.buffer)


if __name__ == "__main__":
    main()
