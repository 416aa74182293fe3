"""The child side of `children`: ``python -m ferrule.frontend.children.child MODULE:FUNCTION MEMORY_BYTES NICENESS``.

A frame is a header (length of the body, seconds that the work may take) and a msgpack body. One frame comes in on
standard input, one goes out, and so on until the parent closes the pipe or is gone. The child ends itself by an
alarm, which no code that it runs can hold up, should the parent not be there to do it. A task that is a class is made
once, without arguments, and called for each frame. The limit is on memory that the process may write (RLIMIT_DATA).
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

import msgspec

from ferrule.errors import PluginError, RequestError

HEADER = struct.Struct("!Id")
HELLO = "ready"
_GRACE = 1.0  # seconds after which the alarm ends a child that its parent should have killed


def main(arguments: list[str]) -> None:
    task, memory, niceness = arguments[0], int(arguments[1]), int(arguments[2])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not look like a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.nice(niceness)
    module, name = task.split(":")
    found = getattr(import_module(module), name)
    work: Callable[[Any], Any] = found() if isinstance(found, type) else found
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        send(replies, HELLO)
        serve(sys.stdin.buffer, replies, work)
    except BrokenPipeError:  # the parent process has exited, so replies have no reader
        os._exit(1)


def serve(requests: BinaryIO, replies: BinaryIO, work: Callable[[Any], Any]) -> None:
    """Answer frames until the end of `requests`."""
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        length, seconds = HEADER.unpack(header)
        body = requests.read(length)
        if len(body) < length:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
        reply = answer(work, body)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        send(replies, reply)


def answer(work: Callable[[Any], Any], body: bytes) -> tuple[Any, ...]:
    """Return ("ok", result), ("refused", message, param), ("plugin", message), or (kind of failure,)."""
    try:
        return ("ok", work(msgspec.msgpack.decode(body)))
    except RequestError as error:
        return ("refused", error.message, error.param)
    except PluginError as error:
        return ("plugin", error.message)
    except MemoryError:
        return ("memory",)
    except RecursionError:
        return ("nesting",)
    except Exception as error:  # the text of a foreign exception is not fit for a client: its class is
        return ("failed", type(error).__name__)


def send(replies: BinaryIO, reply: Any) -> None:
    try:
        body = msgspec.msgpack.encode(reply)
    except MemoryError:
        body = msgspec.msgpack.encode(("memory",))
    except UnicodeEncodeError:
        body = msgspec.msgpack.encode(("surrogate",))
    replies.write(HEADER.pack(len(body), 0.0) + body)
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
