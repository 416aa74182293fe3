"""What is built once in a test run and used by all of its processes: checkpoints, wheels, compiled kernels."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The path `name` of this run, made by the first process that asks for it; the others wait until it is there.

    `make` is given the path and creates a file or a folder there. Under pytest-xdist each process has a temporary
    folder of its own, and what they share lies beside these folders.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path, done = base / f"shared-{name}", base / f"shared-{name}.done"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(path)
            done.touch()
    return path
