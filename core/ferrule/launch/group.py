"""The remaining processes of one that has ended: its workers, which share its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


def kill_group(leader: int) -> bool:
    """Kill the remaining processes of the group of `leader`, which has ended. Returns True when none of them runs any
    more.

    A process that has ended but that its parent has not asked about (a zombie) holds no memory, and does not count.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return True
    with contextlib.suppress(ChildProcessError):  # orphans are ours where this is the first process of a container
        while os.waitpid(-leader, os.WNOHANG)[0]:
            pass
    return sys.platform == "linux" and not any(_states(leader))


def _states(group: int) -> list[str]:
    """Return the state letters of the group's members that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, member_of = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in "ZX":
                found.append(state)
    return found
