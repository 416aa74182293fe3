"""The executor: it starts the child, and passes on what it is asked."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from acme_pipe.frames import METHODS, Ask, Reply, read, write
from ferrule.config import WorkerSettings
from ferrule.errors import EngineDead, RequestError
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.plugins import Plugins
from ferrule.types import ModelInfo, Need, StepPlan, StepResult

_GRACE = 8.0  # seconds that the child has to end


class Link:
    """A child, and the calls that it has not answered yet. Any thread may ask."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # the child is to find the same packages
        self._process = subprocess.Popen(
            [sys.executable, "-m", "acme_pipe.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._numbers = itertools.count()
        self._writing = threading.Lock()
        self._lock = threading.Lock()  # of what follows; never held while a pipe is full
        self._waiting: dict[int, tuple[Future[Any], Any]] = {}
        self._fault: str | None = None
        self._reader = threading.Thread(target=self._read, name="acme-pipe", daemon=True)
        self._reader.start()

    def tell(self, method: str, argument: Any) -> int:
        """Send what has no answer. Returns its number. Raises EngineDead."""
        return self._send(method, argument, None)

    def ask(self, method: str, argument: Any) -> Future[Any]:
        """Send a call. Raises EngineDead."""
        future: Future[Any] = Future()
        self._send(method, argument, future)
        return future

    def fail(self, why: str) -> None:
        """Note that the worker is of no use any more; the first reason stays."""
        with self._lock:
            self._fault = self._fault or why

    def check(self) -> None:
        if self._fault is not None:
            raise EngineDead(self._fault)

    def close(self) -> None:
        """End the child; idempotent, bounded in time."""
        self.fail("the executor has been shut down")
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin and not stdin.closed:
            with suppress(BrokenPipeError):  # the child has gone already
                stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if stdout:
            stdout.close()

    def _send(self, method: str, argument: Any, future: Future[Any] | None) -> int:
        try:
            encoded = msgspec.Raw(msgspec.msgpack.encode(argument))
        except TypeError as error:
            raise RequestError(f"This does not cross a pipe: {error}") from None
        with self._lock:
            self.check()
            number = next(self._numbers)
            if future is not None:
                self._waiting[number] = future, METHODS[method][1]
        try:
            with self._writing:
                write(self._process.stdin, Ask(number, method, encoded))  # type: ignore[arg-type]
        except (OSError, ValueError) as error:  # ValueError: `close` has closed it
            raise EngineDead("the child has ended") from error
        return number

    def _read(self) -> None:
        while (frame := read(self._process.stdout)) is not None:  # type: ignore[arg-type]
            answer = msgspec.msgpack.decode(frame, type=Reply)
            with self._lock:
                future, kind = self._waiting.pop(answer.number)
            if answer.fault is None:
                future.set_result(msgspec.msgpack.decode(answer.value, type=kind))
            else:
                future.set_exception(answer.fault.exception())
        self.fail("the child has ended")
        with self._lock:
            left, self._waiting = self._waiting, {}
        for future, _ in left.values():
            future.set_exception(EngineDead("the child has ended"))


class PipeStep(Step):
    """A step whose result is asked for when somebody needs it, as the worker's thread likes it."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number
        self._result: Future[StepResult] | None = None

    def done(self) -> bool:
        return self._asked().done()

    def result(self) -> StepResult:
        try:
            return self._asked().result()
        except Exception as error:
            self._link.fail(f"a step failed: {error}")
            raise

    def _asked(self) -> Future[StepResult]:
        if self._result is None:
            self._result = self._link.ask("result", self._number)
        return self._result


class AcmePipe(Executor):
    """One worker in a child process."""

    def __init__(self) -> None:
        self._link: Link | None = None

    def check(self, config: WorkerSettings, plugins: Plugins) -> None:
        link = Link()
        try:
            link.ask("check", (config, plugins)).result()
        finally:
            link.close()

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        self._link = Link()
        info: ModelInfo = self._link.ask("start", (config, plugins)).result()
        return info

    def init_cache(self, num_blocks: int) -> None:
        self._started().ask("init_cache", num_blocks).result()

    def submit(self, plan: StepPlan) -> Step:
        link = self._started()
        return PipeStep(link, link.tell("submit", plan))

    def expect(self, backend: str) -> None:
        self._started().tell("expect", backend)

    def prepare(self, need: Need) -> Future[None]:
        return self._started().ask("prepare", need)

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        answer = self._started().ask("call", (name, args)).result()
        return [answer] if name == "collective_rpc" else answer

    def check_health(self) -> None:
        self._started().check()

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()

    def _started(self) -> Link:
        if self._link is None:
            raise EngineDead("the executor is not started")
        return self._link
