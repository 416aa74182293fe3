"""Responses that are generated without a client, and their streams, which can be followed from any event on.

A run belongs to the API process that admitted it. Another process cancels it by ending its record in the store, which
the run looks at every second; readers in other processes look for new events several times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
from msgspec.structs import replace

from ferrule import log
from ferrule.errors import EngineDead, FerruleError, RequestError, RequestFailed
from ferrule.interfaces.response_store import StoredResponse
from ferrule.interfaces.service import Outputs
from ferrule.types import FinishReason
from ferrule_plugins.router.responses.answers import Response, ResponseEvent
from ferrule_plugins.router.responses.form import ResponseForm
from ferrule_plugins.router.responses.history import History

_logger = log.get("responses")

_LOOK = 1.0  # seconds between two looks whether another process has cancelled a run
_AGAIN = 5.0  # seconds until a store that failed is asked again to store the end of a run
_POLL = 0.1  # seconds between two looks for events of another process
_STOPPED = "The server was stopped before the response was finished."
ENGINE_DIED = "The engine has stopped; this request cannot be finished."
UNEXPECTED = "The server failed while serving this request; its log says why."


class _Run:
    """A response that is being generated."""

    task: asyncio.Task[None]

    def __init__(self, form: ResponseForm, record: StoredResponse, streamed: bool) -> None:
        self.form, self.record, self.streamed = form, record, streamed
        self.news = asyncio.Event()  # replaced each time: it wakes those who wait, once

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class Background:
    """The runs of this process."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._runs: dict[tuple[str, str], _Run] = {}

    def begin(self, form: ResponseForm, outputs: Outputs, record: StoredResponse, streamed: bool) -> None:
        """Generate a response that is stored as queued. With `streamed` its events are stored, too."""
        run = _Run(form, record, streamed)
        key = (record.owner, record.id)
        self._runs[key] = run
        run.task = asyncio.create_task(self._live(run, outputs))

        def ended(task: asyncio.Task[None]) -> None:
            if self._runs.get(key) is run:
                del self._runs[key]
            run.wake()

        run.task.add_done_callback(ended)

    async def cancel(self, record: StoredResponse) -> StoredResponse:
        """End a response that is generated, here or in another process, and return its record."""
        told = msgspec.json.decode(record.response) | {"status": "cancelled"}
        await self._history.update(replace(record, response=msgspec.json.encode(told), ended=True))
        await self.forget(record.owner, record.id)
        return await self._history.find(record.owner, record.id)

    async def forget(self, owner: str, response_id: str) -> None:
        """Stop generating a response that is cancelled or deleted."""
        if (run := self._runs.get((owner, response_id))) is not None:
            run.task.cancel()
            await asyncio.wait({run.task})

    async def close(self) -> None:
        """End all runs; their responses have failed."""
        for run in list(self._runs.values()):
            await self.forget(run.record.owner, run.record.id)
            await self._fail(run, _STOPPED)

    async def has_stream(self, record: StoredResponse) -> bool:
        """Return whether the events of a response are stored. Raises NotFoundError when it is deleted meanwhile."""
        owner, name = record.owner, record.id
        while not await self._history.has_event(owner, name, 0):
            if msgspec.json.decode(record.response)["status"] != "queued":  # a stream begins before that
                return False
            await asyncio.sleep(_POLL)
            record = await self._history.find(owner, name)
        return True

    async def follow(self, record: StoredResponse, start: int) -> AsyncIterator[ResponseEvent]:
        """Yield the stored events from number `start` on, until the response has ended.

        Raises NotFoundError when it is deleted meanwhile.
        """
        owner, name = record.owner, record.id
        while True:
            run = self._runs.get((owner, name))
            news = None if run is None else run.news
            ended = (await self._history.find(owner, name)).ended  # asked first: then all of its events are there
            events = await self._history.events(owner, name, start)
            for event in events:
                yield event
            start += len(events)
            if events:
                continue
            if ended:
                return
            if news is None:
                await asyncio.sleep(_POLL)
            else:
                await news.wait()

    # -------------------------------------------------------------------------------------------- one run

    async def _live(self, run: _Run, outputs: Outputs) -> None:
        generating = asyncio.create_task(self._generate(run, outputs))
        try:
            while not generating.done():
                await asyncio.wait({generating}, timeout=_LOOK)
                if not generating.done() and not await self._goes_on(run):
                    return
        finally:
            generating.cancel()
            await asyncio.wait({generating})
            await outputs.aclose()  # a task that never began has not closed them

    async def _goes_on(self, run: _Run) -> bool:
        try:
            return not (await self._history.find(run.record.owner, run.record.id)).ended
        except RequestError:  # it was deleted, or evicted
            return False
        except RequestFailed:  # the store may work again by the end
            return True

    async def _generate(self, run: _Run, outputs: Outputs) -> None:
        form = run.form
        try:
            async with aclosing(outputs):
                await self._tell(run, form.begin())
                await self._keep(run, form.response, ended=False)
                async for output in outputs:
                    if output.finish is FinishReason.ERROR:
                        raise output.failure()
                    events = form.chunk(output)
                    if output.finish is not None:
                        await self._end(run, events)
                        return
                    await self._tell(run, events)
        except Exception as error:
            message = message_of(error)
            while not await self._fail(run, message, isinstance(error, RequestError)):
                await asyncio.sleep(_AGAIN)  # nobody else ends it, and whoever asks for it would wait for ever

    async def _tell(self, run: _Run, events: list[ResponseEvent]) -> None:
        if run.streamed and events:
            await self._history.append(run.record.owner, run.record.id, events)
            run.wake()

    async def _keep(self, run: _Run, response: Response, ended: bool) -> None:
        await self._history.update(replace(run.record, response=msgspec.json.encode(response), ended=ended))

    async def _end(self, run: _Run, events: list[ResponseEvent]) -> None:
        await self._tell(run, events)
        await self._keep(run, run.form.response, ended=True)

    async def _fail(self, run: _Run, message: str, invalid: bool = False) -> bool:
        """Store that a run has failed. Return False where the store fails, too."""
        try:
            if run.form.response["status"] in ("queued", "in_progress"):
                await self._end(run, run.form.fail(message, invalid))
            else:  # that it ended could not be stored
                await self._history.fail(run.record, message)
        except FerruleError as error:
            _logger.error("the end of a response was not stored", id=run.record.id, error=str(error))
            return False
        return True


def message_of(error: Exception) -> str:
    """Return what a client is told of a failure. One that is not Ferrule's own is logged."""
    if isinstance(error, EngineDead):
        return ENGINE_DIED
    if isinstance(error, FerruleError):
        return str(error)
    _logger.error("unexpected error in a background response", exc_info=error)
    return UNEXPECTED
