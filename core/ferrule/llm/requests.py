"""`Requests`: what runs under the request ids of a caller that reads outputs while they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from ferrule.errors import EngineDead, RequestError
from ferrule.hooks import HEADERS
from ferrule.interfaces.service import Generate, Outputs, Service
from ferrule.llm.outputs import RequestOutput
from ferrule.llm.progress import Progress

News = RequestOutput | Exception  # the last of a request is finished, or an exception


@dataclass(eq=False)
class Running:
    """One request. `deliver` is called on the event loop with each of its news, and must not wait."""

    request_id: str
    request: Generate  # of one prompt
    deliver: Callable[[News], None]
    prompt: str | None = None  # text to show where the prompt is ids
    progress: Progress | None = None
    task: asyncio.Task[None] | None = None
    aborted: bool = False  # before it was admitted
    reading: bool = False  # the task has begun: what is cancelled sooner would never close its stream
    dropped: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)  # as of an HTTP call, for hooks: a trace to continue


class Requests:
    """The running requests. They belong to the event loop that owns the service; all methods are called there."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[str, Running] = {}

    async def start(self, running: Running) -> None:
        """Admit a request and begin to deliver its news, in a task of its own. Raises RequestError, also for a request
        id that is in use.
        """
        name, params = running.request_id, running.request.params
        if name in self._running:
            raise RequestError(f"The request_id {name!r:.80} is in use.", "request_id")
        self._running[name] = running
        HEADERS.set(running.headers)
        try:
            admitted = await self._service.admit(running.request)
        except BaseException:
            self._forget(running)
            raise
        running.progress = Progress(
            name, params.n, params.output_kind, admitted.tokens or self._service, admitted.prompts[0], running.prompt
        )
        running.task = asyncio.get_running_loop().create_task(self._run(running, running.progress, admitted.outputs()))
        if running.aborted:
            self.abort([name])

    def abort(self, ids: Iterable[str]) -> None:
        """End requests. Each gets a last output, whose finish reason is "abort". Unknown ids are ignored."""
        for name in ids:
            running = self._running.get(name)
            if running is not None and running.progress is None:
                running.aborted = True
            elif running is not None and running.progress is not None:
                self.drop(running)
                running.deliver(running.progress.abort())

    def drop(self, running: Running) -> None:
        """End a request whose news nobody reads any more. Idempotent."""
        self._forget(running)
        running.dropped = True
        if running.task is not None and running.reading:
            running.task.cancel()

    async def close(self) -> None:
        """End all requests with EngineDead."""
        tasks = []
        for running in tuple(self._running.values()):
            self.drop(running)
            running.deliver(EngineDead("The engine was closed."))
            tasks += [running.task] if running.task is not None else []
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, running: Running) -> None:
        if self._running.get(running.request_id) is running:
            del self._running[running.request_id]

    async def _run(self, running: Running, progress: Progress, stream: Outputs) -> None:
        try:
            async with aclosing(stream):
                running.reading = True
                if running.dropped:
                    return
                async for output in stream:
                    told = progress.take(output)
                    if progress.finished:
                        self._forget(running)
                    if told is not None:
                        running.deliver(told)
        except Exception as error:  # of this request alone; its caller hears of it
            self._forget(running)
            running.deliver(error)
