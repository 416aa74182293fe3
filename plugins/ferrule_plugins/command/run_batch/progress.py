"""The display of a batch's progress: a bar on a terminal, a line in the log every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from ferrule import log

_EVERY = 10.0  # seconds between two lines

_logger = log.get("batch")


class Progress:
    """A display of the run's progress, used as a context manager around the run. `done` and `failed` are from earlier
    runs.
    """

    def __init__(self, total: int, done: int, failed: int, stream: TextIO = sys.stderr) -> None:
        self._total = total
        self._done = done
        self._failed = failed
        self._said = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if stream.isatty():
            self._bar = tqdm(total=total, initial=done, file=stream, desc="Rows", unit="row", dynamic_ncols=True)

    def step(self, failed: bool) -> None:
        """Count one more row whose result is in the journal."""
        self._done += 1
        self._failed += failed
        if self._bar is not None:
            self._bar.set_postfix(errors=self._failed, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._said >= _EVERY:
            self._said = time.monotonic()
            _logger.info("%d of %d rows, %d with errors", self._done, self._total, self._failed)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
