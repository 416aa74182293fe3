"""`ChildPool`: work over client data that may never end or take all memory, in children that can be killed.

Everything of that kind goes through here: chat templates now; any native or super-linear code that meets a client's
data belongs here. A child has a deadline for each piece of work, a memory limit and no way to outlive its
parent for longer than that deadline.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from ferrule import log
from ferrule.errors import OverloadedError, PluginError, RequestError, UnavailableError
from ferrule.frontend.children.child import HEADER, HELLO

_START_SECONDS = 30.0
_MAX_REPLY_BYTES = 256 << 20
_logger = log.get("children")


class Child:
    """One process. `ask` must not be called again before it has returned."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("a child needs pipes")
        self.pid = process.pid
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout

    async def ask(self, body: bytes, seconds: float) -> Any:
        """Send a request to the child and return its reply. Raises TimeoutError, or EOFError when the child died."""
        try:
            async with asyncio.timeout(seconds):
                self._requests.write(HEADER.pack(len(body), seconds) + body)
                await self._requests.drain()
                return await self.receive()
        except (ConnectionError, asyncio.IncompleteReadError):
            raise EOFError from None

    async def receive(self) -> Any:
        length, _ = HEADER.unpack(await self._replies.readexactly(HEADER.size))
        if length > _MAX_REPLY_BYTES:
            raise EOFError
        return msgspec.msgpack.decode(await self._replies.readexactly(length))

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def gone(self) -> None:
        await self._process.wait()


class ChildPool:
    """A pool of at most `size` children that run `task` ("module:function", of Ferrule's code), started when they are
    needed.

    Owned by one event loop. `niceness` lowers the priority of children that work for distrusted input. `setup` makes,
    while a child starts, the msgpack body that the child gets before everything else, to prepare itself; when the task
    answers with a PluginError, no more children are started, because each would fail alike. With `patient`, work waits
    for a free child for as long as a child may take to start, rather than for its own deadline.
    """

    def __init__(
        self,
        task: str,
        *,
        size: int,
        memory_bytes: int,
        niceness: int = 0,
        setup: Callable[[], Awaitable[bytes]] | None = None,
        patient: bool = False,
    ) -> None:
        self._setup = setup
        self._setup_error = ""  # of a PluginError
        self._wait_seconds = _START_SECONDS if patient else 0.0
        self._arguments = ("-m", "ferrule.frontend.children.child", task, str(memory_bytes), str(niceness))
        self._memory_bytes = memory_bytes
        self._places = asyncio.Semaphore(size)
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._dying: set[Child] = set()
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """Processes that can still run."""
        return frozenset(child.pid for child in {*self._idle, *self._busy, *self._dying} if child.alive)

    async def run(self, request: Any, seconds: float, what: str, param: str) -> Any:
        """Return the task's result for `request` (made of plain values).

        Raises RequestError naming `param` when the task refuses, takes longer than `seconds` or needs too much memory,
        OverloadedError when no child gets free or starts in time, UnavailableError when none starts, and PluginError
        for what `setup` raised. Cancelling kills the child.
        """
        body = pack(request, param)
        try:
            async with asyncio.timeout(max(seconds, self._wait_seconds)):
                await self._places.acquire()
        except TimeoutError:
            raise OverloadedError(f"{what} cannot be processed now: too many others are.") from None
        try:
            child = await self._take(what)
            try:
                reply = await child.ask(body, seconds)
            except TimeoutError:
                self._discard(child)
                raise RequestError(f"{what} took longer than {seconds:g} s.", param) from None
            except EOFError:
                self._discard(child)
                raise RequestError(f"{what} cannot be processed.", param) from None
            except BaseException:
                self._discard(child)
                raise
            self._busy.discard(child)
            self._idle.append(child)
        finally:
            self._places.release()
        return self._result(reply, what, param)

    def _result(self, reply: Any, what: str, param: str) -> Any:
        match reply:
            case ["ok", result]:
                return result
            case ["refused", str(message), named]:
                raise RequestError(message, named or param)
            case ["memory"]:
                raise RequestError(f"{what} needed more than {self._memory_bytes >> 20} MiB of memory.", param)
            case ["surrogate"]:
                raise RequestError(f"{what} gives half of a surrogate pair, which is not a character.", param)
            case ["nesting"]:
                raise RequestError(f"{what} is nested too deeply.", param)
            case ["failed", str(kind)]:
                raise RequestError(f"{what} failed ({kind}).", param)
        raise RequestError(f"{what} cannot be processed.", param)

    async def _take(self, what: str) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                self._busy.add(child)
                return child
        if self._closed:
            raise UnavailableError("The server is shutting down.")
        if self._setup_error:
            raise PluginError(self._setup_error)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *self._arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        child = Child(process)
        self._busy.add(child)
        try:
            async with asyncio.timeout(_START_SECONDS):
                if await child.receive() != HELLO:
                    raise EOFError
                if self._setup is not None:
                    self._check_setup(await child.ask(await self._setup(), _START_SECONDS))
        except TimeoutError:  # it has a low priority, and others may have needed all processors
            self._discard(child)
            _logger.error("a helper process did not start in time", pid=child.pid, seconds=_START_SECONDS)
            raise OverloadedError(f"{what} cannot be processed now: its helper process starts too slowly.") from None
        except (EOFError, asyncio.IncompleteReadError):
            self._discard(child)
            _logger.error("a helper process did not start", pid=child.pid)
            raise UnavailableError("A helper process of the server did not start.") from None
        except BaseException:
            self._discard(child)
            raise
        return child

    def _check_setup(self, reply: Any) -> None:
        """Check a child's reply to its setup. Raises PluginError for what the child could not do, and EOFError for
        anything else.
        """
        match reply:
            case ["ok", _]:
                return
            case ["plugin", str(message)]:
                self._setup_error = message
                raise PluginError(message)
        raise EOFError

    def _discard(self, child: Child) -> None:
        child.kill()
        self._busy.discard(child)
        self._dying = {other for other in self._dying if other.alive} | {child}

    async def close(self) -> None:
        """Kill all children and wait until they are gone. Idempotent."""
        self._closed = True
        for child in [*self._idle, *self._busy]:
            self._discard(child)
        self._idle.clear()
        dying, self._dying = self._dying, set()
        for child in dying:
            await child.gone()


def pack(request: Any, param: str) -> bytes:
    """Encode `request` as a body. Raises RequestError that names `param` for values that no body can have."""
    try:
        return msgspec.msgpack.encode(request)
    except UnicodeEncodeError:
        raise RequestError("The text holds a surrogate without its partner: that is no Unicode.", param) from None
    except (OverflowError, RecursionError, TypeError, ValueError):
        raise RequestError("The request holds a value that cannot be processed.", param) from None
