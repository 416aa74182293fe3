"""The child process of `ferrule plugins check`: one plugin, one kit, a report line by line.

A `Task` comes on standard input as JSON. Reports go as JSON lines to the descriptor that it names; the plugin may
write to standard output and standard error.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from ferrule.errors import PluginError
from ferrule.plugin.load import load_ref
from ferrule.plugin.refs import PluginRef
from ferrule_testkit.kits import kit_of
from ferrule_testkit.kits.base import promises
from ferrule_testkit.kits.run import Outcome, run_kit


class Task(msgspec.Struct, frozen=True):
    ref: PluginRef
    path: list[str]  # sys.path of the asking process
    report: int  # descriptor


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The kit is loaded; the plugin's import begins."""

    promises: list[str]  # names, in the order in which they are proved


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The result of importing a plugin; `error` is None for a class that fits its kind."""

    error: str | None
    seconds: float


class Proved(msgspec.Struct, frozen=True, tag=True):
    outcome: Outcome


Report = Ready | Loaded | Proved


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.path[:] = task.path
    kit = kit_of(task.ref.kind)
    _calm()
    _tell(task, Ready([name for name, _ in promises(kit)]))
    start = time.perf_counter()
    error, plugin = None, None
    try:
        plugin = load_ref(task.ref)
    except PluginError as broken:
        error = broken.message
    _tell(task, Loaded(error, time.perf_counter() - start))
    if plugin is not None:
        for outcome in run_kit(kit, plugin, task.ref.name):
            _tell(task, Proved(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # neither threads nor exit handlers that the plugin left may hold the answer


def _calm() -> None:
    """Limit torch to one thread, if the kit imported torch: the work is tiny."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _tell(task: Task, report: Report) -> None:
    os.write(task.report, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
