"""The import of a plugin in a process of its own, so that whatever the import does there can be reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from ferrule.errors import PluginError
from ferrule.plugin.load import load_ref
from ferrule.plugin.options import PluginOption, declared_options, describe_options
from ferrule.plugin.refs import PluginRef

_TIMEOUT = 120.0  # seconds; a first import of torch from a cold disk takes long


class _Task(msgspec.Struct):
    ref: PluginRef
    path: list[str]  # sys.path of the asking process


class Trial(msgspec.Struct):
    """The result of a trial import: `error` is None for a plugin that could be imported and fits its base class;
    `options` are the plugin's options.
    """

    error: str | None
    seconds: float
    options: tuple[PluginOption, ...] = ()


def probe(ref: PluginRef) -> Trial:
    """Import one plugin in a child process. A crash, an exit and a hang are errors like any other."""
    task = msgspec.json.encode(_Task(ref, sys.path))
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], input=task, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Trial(f"its import did not end within {_TIMEOUT:.0f} s", _TIMEOUT)
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Trial)
    except ValueError:
        return Trial(f"its import ended the process: {_ending(done.returncode)}", time.perf_counter() - start)


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def main() -> None:
    """Run the child: read a task from standard input, and write a trial as the last line on standard output."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    sys.path[:] = task.path
    start = time.perf_counter()
    error: str | None = None
    options: tuple[PluginOption, ...] = ()
    try:
        declared = declared_options(load_ref(task.ref))
        options = describe_options(declared) if declared is not None else ()
    except PluginError as broken:
        error = broken.message
    sys.stdout.flush()
    result = msgspec.json.encode(Trial(error, time.perf_counter() - start, options))
    sys.stdout.buffer.write(b"\n" + result)
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the plugin must not delay the answer, or write behind it


if __name__ == "__main__":
    main()
