"""Choices that are ranked: the best of a beam search, and the best of several samples.

A choice of a beam search gets one delta, when the search is over, and is read like any other.

A step of a beam search is a request of one token for each beam; the prefix cache has all but the last block of it.
Engine, scheduler and runner do not know of beams: preemption, limits and cancellation apply to these requests as to any
other.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ferrule import log
from ferrule.client.base import EngineClient
from ferrule.errors import EngineDead, RequestError, RequestFailed
from ferrule.frontend.admission.validate import Checked
from ferrule.frontend.output.choice import OutputStream
from ferrule.frontend.output.reading import OutputReading
from ferrule.frontend.text.detokenize import Detokenizer
from ferrule.frontend.text.stops import StopMatcher
from ferrule.interfaces.service import Output, Outputs
from ferrule.sampling_params import Beam
from ferrule.types import EngineRequest, FinishReason, RequestDelta, RequestTimes, TokenLogprobs, TokenSampling

_logger = log.get("frontend")


class Hypothesis(Struct, frozen=True, eq=False):
    """A beam: the tokens behind the prompt, and `total`, the sum of their logprobs."""

    detokenizer: Detokenizer | None
    stops: StopMatcher | None
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    finish: FinishReason | None = None
    stop_reason: int | None = None


def search_beams(
    client: EngineClient,
    beam: Beam,
    requests: Sequence[EngineRequest],
    readings: Sequence[OutputReading],
    tasks: set[asyncio.Task[Any]],
) -> tuple[list[AsyncIterator[RequestDelta]], Callable[..., None]]:
    """Start a search for each prompt. Return a stream of deltas for each choice in `requests`, and a function that
    cancels all searches.

    `tasks` are the service's running tasks, to which the searches are added.
    """
    loop, n = asyncio.get_running_loop(), len(requests) // len(readings)
    searches = [
        loop.create_task(_Search(client, beam, request, reading).run())
        for request, reading in zip(requests[::n], readings, strict=True)
    ]
    for task in searches:
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def read(search: asyncio.Task[list[RequestDelta]], rank: int) -> AsyncIterator[RequestDelta]:
        deltas = await asyncio.shield(search)
        yield deltas[min(rank, len(deltas) - 1)]  # an error is the only delta

    def cancel(ids: Sequence[str], reason: FinishReason) -> None:
        for task in searches:
            task.cancel()

    return [read(searches[index // n], index % n) for index in range(len(requests))], cancel


@dataclass
class _Search:
    """The beam search of one prompt. A step is a one-token request for each beam; the prefix cache has all but the end
    of its prompt.
    """

    client: EngineClient
    beam: Beam
    request: EngineRequest
    reading: OutputReading
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int | None = None
    preemptions: int = 0
    times: RequestTimes | None = None

    async def run(self) -> list[RequestDelta]:
        """Return the beams, best first, each as a choice's only delta. An error of one of the requests is the result of
        all.
        """
        try:
            return [self._delta(beam) for beam in await self._search()]
        except EngineDead:
            raise
        except (RequestError, RequestFailed) as error:
            invalid = isinstance(error, RequestError)
            return [RequestDelta(id=self.request.id, finish=FinishReason.ERROR, error=error.message, invalid=invalid)]
        except Exception:
            _logger.exception("a beam search failed", id=self.request.id)
            return [RequestDelta(id=self.request.id, finish=FinishReason.ERROR)]

    async def _search(self) -> list[Hypothesis]:
        width, limit = self.beam.width, self.request.work.max_tokens
        running, over = [Hypothesis(self.reading.detokenizer, self.reading.stops)], list[tuple[float, Hypothesis]]()
        for length in range(1, limit + 1):
            running, ended = self._grow(running, await self._step(running), length)
            if length == limit:
                ended += [replace(beam, finish=FinishReason.LENGTH) for beam in running]
            scale = length**self.beam.length_penalty
            over += [(beam.total / scale, beam) for beam in ended]
            over = sorted(over, key=itemgetter(0), reverse=True)[:width]
            full = len(over) == width
            if not running or (full and (self.beam.early_stopping or running[0].total / scale <= over[-1][0])):
                break
        return [beam for _, beam in over]

    async def _step(self, beams: Sequence[Hypothesis]) -> list[TokenLogprobs]:
        """Return the most likely next tokens of each beam: enough of them even where all stop ids come first."""
        request, sampling = self.request, self.request.work
        top = max(self.beam.width + len(sampling.stop_token_ids), sampling.logprobs or 0)
        prompt = None if beams[0].ids else sampling.prompt_logprobs
        asked = TokenSampling(seed=0, max_tokens=1, temperature=0.0, logprobs=top, prompt_logprobs=prompt)
        requests = [
            replace(request, id=secrets.token_hex(16), prompt_ids=request.prompt_ids + beam.ids, work=asked)
            for beam in beams
        ]
        streams = [self.client.generate(one) for one in requests]
        try:
            return [await self._read(stream) for stream in streams]
        except BaseException:
            self.client.cancel([one.id for one in requests])
            raise

    async def _read(self, stream: AsyncIterator[RequestDelta]) -> TokenLogprobs:
        found: tuple[TokenLogprobs, ...] = ()
        async for delta in stream:
            found += delta.logprobs
            self.prompt_logprobs += delta.prompt_logprobs
            self.cached = delta.cached if self.cached is None else self.cached
            self.preemptions += delta.num_preemptions
            if delta.times is not None:
                self.times = replace(self.times or delta.times, finished=delta.times.finished)
            if delta.finish in {FinishReason.ERROR, FinishReason.ABORT}:
                kind = RequestError if delta.invalid else RequestFailed
                raise kind(delta.error or "A request of the beam search was ended.")
        return found[0]

    def _grow(
        self, beams: Sequence[Hypothesis], nexts: Sequence[TokenLogprobs], length: int
    ) -> tuple[list[Hypothesis], list[Hypothesis]]:
        """Return (beams that go on, beams that end), best first. A beam ends only if it is among the `width` best."""
        sampling, width = self.request.work, self.beam.width
        early = length <= sampling.min_tokens
        candidates = [
            (beam.total + logprob, beam, found.top, place)
            for beam, found in zip(beams, nexts, strict=True)
            for place, (token, logprob) in enumerate(found.top)
            if not (early and token in sampling.stop_token_ids)
        ]
        running: list[Hypothesis] = []
        ended: list[Hypothesis] = []
        for number, (_, beam, top, place) in enumerate(sorted(candidates, key=itemgetter(0), reverse=True)):
            token = TokenLogprobs(*top[place], place + 1, top[: sampling.logprobs or 0])
            grown = self._extend(beam, token, early)
            if grown.finish is None:
                running.append(grown)
            elif number < width:
                ended.append(grown)
            if len(running) == width:
                break
        return running, ended

    def _extend(self, beam: Hypothesis, token: TokenLogprobs, early: bool) -> Hypothesis:
        detokenizer, stops = beam.detokenizer, copy(beam.stops)
        stop = token.token_id if token.token_id in self.request.work.stop_token_ids else None
        finish = None if stop is None else FinishReason.STOP
        if detokenizer is not None and stops is not None:
            detokenizer = copy(detokenizer)
            text = detokenizer.feed(token.token_id)
            stops.feed("" if early or finish else text)
            finish = FinishReason.STOP if stops.matched else finish
        ids, logprobs = (*beam.ids, token.token_id), (*beam.logprobs, token)
        return Hypothesis(detokenizer, stops, ids, logprobs, beam.total + token.logprob, finish, stop)

    def _delta(self, beam: Hypothesis) -> RequestDelta:
        return RequestDelta(
            id=self.request.id,
            token_ids=beam.ids,
            logprobs=() if self.request.work.logprobs is None else beam.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finish=beam.finish,
            stop_reason=beam.stop_reason,
            cached=self.cached or 0,
            num_preemptions=self.preemptions,
            times=self.times,
        )


class BestOf(Outputs):
    """The `n` choices of each prompt with the highest sum of logprobs, best first, once all its choices have ended.

    The tokens of the other choices count as the best one's.
    """

    def __init__(self, stream: OutputStream, checked: Checked) -> None:
        stream.whole = True
        self._stream = stream
        self._checked = checked
        self._groups: dict[int, list[list[Output]]] = {}  # by prompt, then by choice
        self._ready: deque[Output] = deque()

    async def __anext__(self) -> Output:
        while not self._ready:
            output = await anext(self._stream)
            prompt, number = divmod(output.index, self._checked.best_of)
            group = self._groups.setdefault(prompt, [[] for _ in range(self._checked.best_of)])
            group[number].append(output)
            if all(outputs and outputs[-1].finish for outputs in group):
                self._rank(prompt, self._groups.pop(prompt))
        return self._ready.popleft()

    async def aclose(self) -> None:
        self._ready.clear()
        await self._stream.aclose()

    def _rank(self, prompt: int, group: list[list[Output]]) -> None:
        group.sort(key=self._total, reverse=True)
        n, best = self._checked.n, group[0][-1]
        paid = [best.usage, *(outputs[-1].usage for outputs in group[n:])]
        completion, reasoning = (
            sum(getattr(one, name) for one in paid) for name in ("completion_tokens", "reasoning_tokens")
        )
        usage = replace(best.usage, completion_tokens=completion, reasoning_tokens=reasoning)
        group[0][-1] = replace(best, usage=usage)
        for place, outputs in enumerate(group[:n], prompt * n):
            self._ready += [
                replace(output, index=place, logprobs=() if self._checked.logprobs is None else output.logprobs)
                for output in outputs
            ]

    def _total(self, outputs: Sequence[Output]) -> float:
        if outputs[-1].finish not in {FinishReason.STOP, FinishReason.LENGTH}:
            return -math.inf
        return self._stream.score(outputs[-1].index)
