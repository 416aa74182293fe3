"""Reads folders that may never answer, such as those of a network share, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import TypeVar

import torch

from ferrule.errors import UnavailableError
from ferrule_plugins.adapter_bank.lora.pace import Pace

T = TypeVar("T")

_PATIENCE = 30.0  # seconds without a tensor after which a read is given up
_MOST = 64  # threads that are left behind in reads that were given up
_HANGS = "The adapter's folder does not answer."


class FolderReads:
    """Reads of folders. A thread whose read was given up stays until the system answers it: nothing can end it."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._given_up: dict[Path, Future[object]] = {}

    def __call__(self, folder: Path, read: Callable[[Path, Pace], T], pace: Pace) -> T:
        """Return what `read` does, which is to rest after each tensor. Raises what it raises.

        Raises UnavailableError after too long without a tensor, and at once for a folder with which that is so.
        """
        with self._lock:
            self._given_up = {path: future for path, future in self._given_up.items() if not future.done()}
            if folder in self._given_up or len(self._given_up) >= _MOST:
                raise UnavailableError(_HANGS)
        future: Future[T] = Future()
        threading.Thread(
            target=_run, args=(future, folder, read, pace), name="ferrule-adapter-read", daemon=True
        ).start()
        while True:
            seen = pace.rests
            try:
                return future.result(self._patience)
            except TimeoutError:
                if future.done() or pace.rests != seen:
                    continue
            with self._lock:
                self._given_up[folder] = future  # type: ignore[assignment]
            raise UnavailableError(_HANGS)


def _run(future: Future[T], folder: Path, read: Callable[[Path, Pace], T], pace: Pace) -> None:
    torch.set_num_threads(1)
    try:
        future.set_result(read(folder, pace))
    except BaseException as error:
        future.set_exception(error)
