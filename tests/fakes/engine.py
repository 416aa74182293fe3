"""`FakeEngine`: an engine client without an engine. A script says what each request generates.

By default a request generates its own prompt, token by token, and ends with its length. Every delta is a turn of the
event loop, so interleaving and cancelling behave as with a real engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from ferrule.client.base import EngineClient
from ferrule.errors import EngineDead, RequestFailed
from ferrule.interfaces.service import Health
from ferrule.shared_memory.board import Board
from ferrule.types import (
    CacheGroup,
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelInfo,
    RequestDelta,
    RequestTimes,
    TokenLogprobs,
)

Script = Callable[[EngineRequest], Iterable[RequestDelta]]


def fake_info(vocab_size: int = 2048, max_model_len: int = 256, block_size: int = 16) -> ModelInfo:
    """Return the description of a model that exists on paper only."""
    return ModelInfo(
        architecture="FakeForCausalLM",
        implementation="fake",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype="float32",
        device="none",
        attention="none",
        groups=(CacheGroup("full", block_size),),
        page_bytes=1,
        max_blocks=1024,
    )


def tokens(request: EngineRequest, ids: Iterable[int], finish: FinishReason | None = None) -> Iterator[RequestDelta]:
    """Yield one delta per token, with logprobs where asked for; `finish` (by default the length) comes with the last
    one. A stop token of the request ends it.
    """
    sampling = request.work
    kept = list(ids)[: sampling.max_tokens]
    for number, token in enumerate(kept, 1):
        stopped = finish is None and token in sampling.stop_token_ids and number > sampling.min_tokens
        end = FinishReason.STOP if stopped else (finish or FinishReason.LENGTH) if number == len(kept) else None
        yield RequestDelta(
            id=request.id,
            token_ids=(token,),
            logprobs=_logprobs(token, sampling.logprobs),
            prompt_logprobs=_prompt_logprobs(request) if number == 1 else (),
            finish=end,
            stop_reason=token if stopped else None,
        )
        if stopped:
            return


def echo(request: EngineRequest) -> Iterator[RequestDelta]:
    """Repeat the prompt, over and over, until max_tokens."""
    ids = request.prompt_ids * (request.work.max_tokens // len(request.prompt_ids) + 1)
    return tokens(request, ids)


def says(ids: Sequence[int], finish: FinishReason | None = None) -> Script:
    """Return a script that answers every request with the same ids."""
    return lambda request: tokens(request, ids, finish)


def _logprobs(token: int, count: int | None) -> tuple[TokenLogprobs, ...]:
    if count is None:
        return ()
    top = tuple((token + rank, -0.5 - rank) for rank in range(count))
    return (TokenLogprobs(token, -0.5, 1, top),)


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs, ...]:
    count = request.work.prompt_logprobs
    return () if count is None else tuple(_logprobs(token, count)[0] for token in request.prompt_ids[1:])


class FakeStream(AsyncIterator[RequestDelta]):
    def __init__(self, engine: FakeEngine, request: EngineRequest) -> None:
        self.request = request
        self.cancelled: FinishReason | None = None
        self._engine = engine
        self._deltas = iter(engine.script(request))
        self._over = False

    async def __anext__(self) -> RequestDelta:
        await asyncio.sleep(0)
        while not self._over and not self._engine.running.is_set() and self.cancelled is None:
            await self._engine.turn()
        if self._engine.dead is not None:
            raise self._engine.dead
        if self._over:
            raise StopAsyncIteration
        if self.cancelled is not None:
            return self._end(RequestDelta(id=self.request.id, finish=self.cancelled))
        delta = next(self._deltas)
        return delta if delta.finish is None else self._end(delta)

    def _end(self, delta: RequestDelta) -> RequestDelta:
        self._over = True
        self._engine.live.pop(self.request.id, None)
        arrival = self.request.arrival
        times = RequestTimes(arrival, arrival + 1e-3, arrival + 2e-3, max(arrival + 3e-3, time.monotonic()))
        return replace(delta, times=times)

    async def aclose(self) -> None:
        if not self._over:
            self._over = True
            self._engine.cancel([self.request.id])
            self._engine.live.pop(self.request.id, None)


class FakeEngine(EngineClient):
    """An engine that a script drives. `requests`, `cancels` and `expected` record what came in. Clear `running` to hold
    all deltas back.
    """

    def __init__(self, script: Script = echo, info: ModelInfo | None = None, num_blocks: int = 1024) -> None:
        self.script = script
        self.info = info or fake_info()
        self.num_blocks = num_blocks
        self.board = Board()
        self.requests: list[EngineRequest] = []
        self.cancels: list[tuple[str, FinishReason]] = []
        self.expected: list[str] = []
        self.live: dict[str, FakeStream] = {}
        self.running = asyncio.Event()
        self.running.set()
        self.dead: EngineDead | None = None
        self.state = "ready"
        self.figures = EngineStats()
        self._woken = asyncio.Event()

    def generate(self, request: EngineRequest, patient: bool = False) -> FakeStream:
        if self.dead is not None:
            raise self.dead
        self.requests.append(request)
        stream = self.live[request.id] = FakeStream(self, request)
        return stream

    def cancel(self, ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        for id in ids:
            self.cancels.append((id, reason))
            stream = self.live.get(id)
            if stream is not None:
                stream.cancelled = reason
        self._wake()

    def resume(self) -> None:
        self.running.set()
        self._wake()

    def die(self, message: str = "The engine died.") -> None:
        self.dead = EngineDead(message)
        self.state = "dead"
        self.resume()

    async def turn(self) -> None:
        """Wait until something has changed."""
        await self._woken.wait()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    def expect(self, backend: str) -> None:
        self.expected.append(backend)

    async def call(self, name: str, *args: Any) -> Any:
        if self.dead is not None:
            raise self.dead
        if name == "reset_prefix_cache":
            return True
        raise RequestFailed(f"The engine has no call named {name}.")

    def health(self) -> Health:
        return Health(state=self.state)

    def stats(self) -> EngineStats:
        return self.figures

    async def close(self) -> None:
        self.die("The engine client was closed.")
