"""One run of a batch, from the parsed options to the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from ferrule import log
from ferrule.api.lifecycle import DEAD
from ferrule.api.server import loop_factory
from ferrule.client.inline import InlineClient
from ferrule.config import Resolved
from ferrule.errors import EngineDead, StartupError
from ferrule.frontend.service import build_service
from ferrule.hooks import HookRunner, open_hooks
from ferrule.launch.check import open_api
from ferrule.launch.engine_main import watch_progress
from ferrule.launch.listen import base_url
from ferrule.locate.localise import localise
from ferrule.plugin import Plugins
from ferrule_plugins.batch.drive import Asker, Drive
from ferrule_plugins.batch.journal import Journal
from ferrule_plugins.batch.local import ask, served_urls
from ferrule_plugins.batch.source import Survey, read_rows, survey
from ferrule_plugins.command.listen import bind
from ferrule_plugins.command.run_batch.figures import figures
from ferrule_plugins.command.run_batch.files import Target, opened
from ferrule_plugins.command.run_batch.options import BatchConfig
from ferrule_plugins.command.run_batch.progress import Progress

_FAILED = 1
_INTERRUPTED = 130
_LOOPBACK = "127.0.0.1"

_logger = log.get("batch")


@dataclass(frozen=True)
class Batch:
    """A batch to run. `run` is the journal's first line, without the hash of the input."""

    options: BatchConfig
    config: Resolved
    plugins: Plugins
    run: dict[str, Any]


def run_batch(batch: Batch) -> int:
    """Run a batch. Returns 0 when every row has its result, also when some are errors. Raises StartupError."""
    options, most = batch.options, batch.config.limits.max_body_bytes
    target = Target(options.output_file, options.output_tmp_dir)
    start = time.monotonic()
    with opened(options.input_file, target.folder, options.max_input_bytes) as file:
        if target.is_file(file):
            raise StartupError("The output is the input.", "Name another file with -o.")
        seen = survey(file, most)
        journal = Journal(target.journal, {"input_sha256": seen.sha256, **batch.run}, seen.lines)
        with contextlib.closing(journal):
            before = journal.done
            if before:
                _logger.info("resuming: %d of %d rows are done", before, seen.rows)
            if before < seen.rows:
                status = _work(batch, file, seen, journal)
                if status:
                    print(f"{journal.done} of {seen.rows} rows are done; run the same command again to continue.")
                    return status
            target.publish(journal)
            journal.remove()
    seconds = time.monotonic() - start
    print(
        f"{seen.rows} rows: {seen.rows - journal.failed} answered, {journal.failed} with errors. "
        f"{seen.rows - before} of them in {seconds:.1f} s. Results: {target.shown}"
    )
    return 0


def _work(batch: Batch, file: BinaryIO, seen: Survey, journal: Journal) -> int:
    """Load the model and answer the rows that are not done."""
    options = batch.options
    listener = bind(options.host or _LOOPBACK, options.port) if options.enable_metrics else None
    config = localise(batch.config, batch.plugins)
    if listener is not None:
        _logger.info("metrics at %s/metrics", base_url(listener, config))
    hooks = open_hooks(batch.plugins, config)
    hooks.process_started("run-batch", config)
    status = _FAILED
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            rows = functools.partial(read_rows, file, seen, journal, max_body_bytes=config.limits.max_body_bytes)
            run = _Run(config, batch.plugins, hooks, journal)
            with Progress(seen.rows, journal.done, journal.failed) as progress:
                status = runner.run(run.main(rows, progress, listener, options.max_inflight))
        return status
    finally:
        if listener is not None:
            listener.close()
        hooks.process_stopping("run-batch", status)


class _Run:
    """The part that needs an event loop."""

    def __init__(self, config: Resolved, plugins: Plugins, hooks: HookRunner, journal: Journal) -> None:
        self._config = config
        self._plugins = plugins
        self._hooks = hooks
        self._journal = journal
        self._front, self._inputs = open_api(config, plugins, hooks=hooks)
        self._lifecycle = self._front.lifecycle

    async def main(self, rows: Callable[..., Any], progress: Progress, listener: Any, inflight: int | None) -> int:
        app = self._front.app
        window = inflight or 2 * self._config.scheduler.max_num_seqs
        drive = Drive(Asker(functools.partial(ask, app), self._alive), self._journal, progress, lambda: window)
        async with AsyncExitStack() as stack:
            stack.enter_context(_signals(drive))
            await stack.enter_async_context(figures(app, listener))
            if not await self._ready(stack, drive.stopping):
                return _INTERRUPTED
            try:
                await drive.run(rows(urls=await served_urls(app)), self._config.frontend.shutdown_timeout)
            except EngineDead as error:
                _logger.error("%s", error)
                return _FAILED
            return _INTERRUPTED if drive.stopping.is_set() else 0

    async def _ready(self, stack: AsyncExitStack, stopping: asyncio.Event) -> bool:
        """Load the model; return False when the run was stopped meanwhile."""
        client = InlineClient(self._config, self._plugins)
        stack.push_async_callback(client.close)
        loading = asyncio.create_task(client.wait_ready())
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            return False
        loading.result()
        service = build_service(self._config, self._plugins, client, hooks=self._hooks, inputs=self._inputs)
        stack.push_async_callback(service.close)
        service.start()
        self._lifecycle.ready(service)
        if client.loop is not None:
            watch_progress(client.loop, self._config.parallel.watchdog_timeout, client.board)
        return True

    def _alive(self) -> bool:
        return self._lifecycle.live.engine_health().state != DEAD


@contextlib.contextmanager
def _signals(drive: Drive) -> Iterator[None]:
    """Handle SIGTERM and SIGINT: the first one ends the sending of rows, the second also the requests that run."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def heard() -> None:
        (drive.insisted if drive.stopping.is_set() else drive.stopping).set()

    for number in numbers:
        loop.add_signal_handler(number, heard)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
