"""The start of a child process: read the boot message, exit with the parent, run one role."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from importlib import import_module
from typing import BinaryIO

import msgspec

from ferrule import log
from ferrule.config.places import place
from ferrule.env import before_numpy
from ferrule.errors import FerruleError, StartupError, exit_status
from ferrule.hooks import HookRunner, open_hooks
from ferrule.launch import collector
from ferrule.launch.prepare import open_log
from ferrule.launch.process import LENGTH_BYTES, MAX_BOOT_BYTES, Boot
from ferrule.launch.resources import as_startup_error, memory_limits
from ferrule.launch.streams import Exit, usable_streams

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 20  # of the boot message, at once


def read_boot(stream: BinaryIO) -> Boot:
    """Read the boot message that `Child` wrote. Raises StartupError for anything else, or where the message ends
    early.
    """
    length = int.from_bytes(_exactly(stream, LENGTH_BYTES), "big")
    if length > MAX_BOOT_BYTES:
        raise StartupError(f"The boot message has {length} bytes; the largest that is read has {MAX_BOOT_BYTES}.")
    try:
        return msgspec.json.decode(_exactly(stream, length), type=Boot)
    except msgspec.MsgspecError as error:
        raise StartupError(f"The boot message cannot be read: {error}.") from None


def _exactly(stream: BinaryIO, length: int) -> bytes:
    """Read `length` bytes of a pipe, which may return fewer at a time. Raises StartupError where the pipe ends
    early.
    """
    parts, left = [], length
    while left:
        part = stream.read(min(left, _READ_BYTES))
        if not part:
            raise StartupError(f"The boot message ends {left} bytes early: the parent process may have died.")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def die_with_parent(stream: BinaryIO) -> None:
    """Exit when the parent does: by the kernel's signal where there is one, and at the end of the boot pipe
    everywhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while stream.read(1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: list[str]) -> int:
    """Run one role. A StartupError becomes one readable block and its exit status."""
    roles = ("engine", "api")
    if len(argv) != 1 or argv[0] not in roles:
        print(f"usage: python -m ferrule.launch.child {{{','.join(roles)}}} < boot message", file=sys.stderr)
        return 2
    usable_streams()
    before_numpy()
    collector.put_off()
    stream = os.fdopen(os.dup(0), "rb", buffering=0)
    try:
        boot = read_boot(stream)
    except StartupError as error:
        report(error)
        return 1
    # The launcher decides when to stop, not the terminal, which must not suspend background processes that log, either.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    hooks, status = HookRunner(), 1
    try:
        die_with_parent(stream)
        open_log(boot.config, boot.name if boot.config.frontend.api_server_count > 1 else argv[0])
        hooks = open_hooks(boot.plugins, boot.config)
        hooks.process_started(boot.name, boot.config)
        if argv[0] == "engine":
            if memory_limits():
                import_module("numpy")  # first: OpenBLAS retries for ever if it gets no buffer
            from ferrule.launch.engine_main import run_engine

            status = run_engine(boot)
        else:
            from ferrule.launch.api_main import run_api

            status = run_api(boot, hooks)
        return status
    except (FerruleError, ImportError, MemoryError, OSError, RuntimeError) as error:
        told = as_startup_error(error) or (error if isinstance(error, FerruleError) else None)
        if told is None or boot.config.observability.debug:
            raise
        if isinstance(told, StartupError):
            place(told, boot.config.places)
        report(told)
        status = exit_status(told)
        return status
    finally:
        hooks.process_stopping(boot.name, status)


def report(error: BaseException) -> None:
    """Print a start-up error as one block."""
    log.last_words(f"\nferrule: {error}\n\n")


if __name__ == "__main__":
    Exit().leave(main(sys.argv[1:]))
