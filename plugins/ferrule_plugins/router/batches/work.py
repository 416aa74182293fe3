"""The worker of one API process: it finds batches that have not ended, and runs those that no other process runs.

The state of a batch is on disk, so it does not matter which process goes on with it, or after what:

    validating   the input is read for the first time
    in_progress  the journal has the results so far, each once
    finalizing   all lines have a result; output files are written under ids that follow from the batch's own

A batch whose process was killed is found by another one, or by the next, and continues in its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

from ferrule import log
from ferrule.errors import EngineDead, StartupError, UnavailableError
from ferrule.interfaces.router import ON_BEHALF, RouterContext
from ferrule_plugins.batch.drive import Asker
from ferrule_plugins.batch.local import ask
from ferrule_plugins.router.batches.options import StoreOptions
from ferrule_plugins.router.batches.run import Run
from ferrule_plugins.router.batches.store import LIVE, Store

_AT_ONCE = 4  # batches that one process runs; more of them wait
_LOOK = 1.0  # seconds between two looks for batches of other processes
_SWEEP = 300.0  # seconds between two looks for what has expired
_QUIET = 10.0  # seconds after a request of a client until lines take all places again
_PAUSE = 10.0  # seconds until a batch is tried again after an error
_MOST_SEQS = 256  # the default of --max-num-seqs
_RUNS = ("ready", "stalled")  # states of a server whose engine runs

_logger = log.get("batches")


class Worker:
    """The task that runs batches, from `start` to `close`."""

    def __init__(self, ctx: RouterContext, store: Store, options: StoreOptions) -> None:
        self._ctx = ctx
        self._store = store
        self._options = options
        self._most = options.max_inflight or max(1, (ctx.config.scheduler.max_num_seqs or _MOST_SEQS) // 2)
        self._quiet_from = 0.0  # a monotonic time, after which clients have had no request for a while
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._runs: dict[str, Run] = {}
        self._ended: set[str] = set()  # batches that need not be looked at again
        self._not_before: dict[str, float] = {}  # monotonic times by batch

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop. Batches that run go on where they were when a server is started again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def wake(self) -> None:
        """Look for batches now."""
        self._awake.set()

    async def _work(self) -> None:
        swept = -_SWEEP
        async with asyncio.TaskGroup() as group:
            while True:
                self._awake.clear()
                try:
                    if time.monotonic() - swept >= _SWEEP:
                        swept = time.monotonic()
                        await asyncio.to_thread(self._store.sweep)
                    if self._serves():
                        for id in await asyncio.to_thread(self._waiting):
                            self._begin(id, group)
                except OSError as error:
                    _logger.error("the folder of batches cannot be read: %s", error.strerror)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK):
                        await self._awake.wait()

    def _serves(self) -> bool:
        try:
            return self._ctx.service.health().state in _RUNS
        except UnavailableError:
            return False

    def _waiting(self) -> list[str]:
        """Return the batches that have not ended and are not run here, from the oldest. Raises OSError."""
        ids = set(self._store.batches.ids())
        self._ended &= ids
        found = [record for id in ids - self._ended - self._runs.keys() if (record := self._store.batches.read(id))]
        for record in found:
            if record.status not in LIVE:
                self._store.tidy(record)  # a process may have been killed before it did
                self._ended.add(record.id)
        return [record.id for record in sorted(found, key=lambda one: one.order) if record.status in LIVE]

    def _begin(self, id: str, group: asyncio.TaskGroup) -> None:
        if len(self._runs) < _AT_ONCE and time.monotonic() >= self._not_before.get(id, 0.0):
            most = int(self._ctx.config.options["max_body_bytes"]), self._options.max_lines
            self._runs[id] = Run(id, self._store, self._asker, self._window, *most)
            group.create_task(self._one(self._runs[id]))

    async def _one(self, run: Run) -> None:
        """Run one batch to its end, to the end of this process, or to an error after which it is tried again."""
        try:
            with self._store.batches.claimed(run.id) as mine:
                if mine:
                    await run.work(self._serves)
        except EngineDead as error:
            _logger.warning("%s waits: %s", run.id, error)
        except (OSError, StartupError) as error:
            _logger.error("%s waits: %s", run.id, getattr(error, "message", error))
        except Exception:
            _logger.exception("%s waits", run.id)
        finally:
            del self._runs[run.id]
        self._not_before[run.id] = time.monotonic() + _PAUSE
        if run.ended:
            del self._not_before[run.id]
            self.wake()

    def _asker(self, id: str, key: str) -> Asker:
        """Return the way of a batch's requests: on behalf of its key, and until they are answered."""
        send = partial(ask, self._ctx.app, client=id, more={ON_BEHALF: key})
        return Asker(send, self._serves, busy_tries=None, fault_tries=2)

    def _window(self) -> int:
        """Return how many requests of each batch may be in flight now.

        A request in flight cannot be taken back, so there are few of them as long as clients are about.
        """
        now, clients = time.monotonic(), self._ctx.load()
        if clients:
            self._quiet_from = now + _QUIET
        most = self._most - clients
        if now <= self._quiet_from:
            most = min(most, self._options.max_beside_clients)
        return max(1, most // self._ctx.config.frontend.api_server_count // max(1, len(self._runs)))
