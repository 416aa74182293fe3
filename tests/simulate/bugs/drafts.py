"""Planted bugs about guesses: in the scheduler, and on the device, which takes the wrong ones back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ferrule.engine.cache import KVCacheManager
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler, Draft
from ferrule.engine.snapshots import Borders
from ferrule.types import Chunk, EngineRequest, FinishReason, RequestDelta, RowResult
from ferrule_testkit.fakes import FakeDevice, SlotState
from tests.simulate.bugs.cache import Patched


class OtherRequests(DefaultScheduler):
    """Has requests of a subclass with a mistake."""

    request_cls: type[Request] = Request

    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].__class__ = self.request_cls


# ------------------------------------------------------------------------------------------- scheduler


class RejectedTokenStaysCached(Patched):
    """Publishes the block that the first wrong guess has filled, under the token that came instead."""

    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        self.cache.wrong = 0 < len(row.token_ids) <= chunk.drafts
        return super()._credit(request, chunk, row, now)

    class cache_cls(KVCacheManager):
        wrong = False

        def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
            super().confirm(id, ids, len(ids) if self.wrong else computed)


class LengthOnlyGrows(OtherRequests):
    class request_cls(Request):
        __slots__ = ()

        def settle(self, drafts: int, right: int) -> None:
            super().settle(drafts, drafts)


class RightGuessesComputedAgain(OtherRequests):
    class request_cls(Request):
        __slots__ = ()

        def settle(self, drafts: int, right: int) -> None:
            self.confirmed -= drafts - right


class GuessesBehindAnUnknownToken(DefaultScheduler):
    def _waits(self, request: Request) -> bool:
        return self._guessing > 0


class RunsOnBeforeTheResult(DefaultScheduler):
    def _waits(self, request: Request) -> bool:
        return False


class GuessesOutliveTheirToken(DefaultScheduler):
    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        return super()._credit(request, chunk, replace(row, drafts=row.drafts or request.guesses), now)


class GuessesSurvivePreemption(OtherRequests):
    class request_cls(Request):
        __slots__ = ()

        def retreat(self) -> None:
            guesses = self.guesses
            super().retreat()
            self.guesses = guesses


class TokensBehindAStop(OtherRequests):
    class request_cls(Request):
        __slots__ = ()

        def append(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None, int | None]:
            _, finish, stop = super().append(token_ids)
            return len(token_ids), finish, stop


class GuessesBehindTheLimit(DefaultScheduler):
    def _affordable(self, request: Request, draft: Draft) -> tuple[int, ...]:
        limit, request.limit = request.limit, request.limit + 2
        try:
            return super()._affordable(request, draft)
        finally:
            request.limit = limit


class GuessesOverTheBudget(DefaultScheduler):
    def _affordable(self, request: Request, draft: Draft) -> tuple[int, ...]:
        draft.spare = 100
        return super()._affordable(request, draft)


class GuessesWithoutBlocks(DefaultScheduler):
    def _give(self, request: Request, count: int, draft: Draft, now: float) -> None:
        guesses, request.guesses = self._affordable(request, draft), ()
        super()._give(request, count, draft, now)
        chunk = draft.chunks.get(request.id)
        if guesses and chunk is not None:
            request.guesses = guesses
            draft.chunks[request.id] = draft.guess(chunk, guesses)
            draft.budget -= len(guesses)


class StatesSavedBehindGuesses(DefaultScheduler):
    def _affordable(self, request: Request, draft: Draft) -> tuple[int, ...]:
        borders, request.borders = request.borders, Borders()
        try:
            return super()._affordable(request, draft)
        finally:
            request.borders = borders


class BlocksOfGuessesForgotten(Patched):
    """Takes blocks back when guesses were wrong, and does not tell the runner, whose table has them still."""

    class cache_cls(KVCacheManager):
        def confirm(self, id: str, ids: Sequence[int], computed: int) -> None:
            super().confirm(id, ids, computed)
            held = self._requests[id]
            spare = held.capacity // self._size - (computed // self._size + 1)
            if spare > 0 and computed > 0 and all(len(table) > spare for table in held.tables):
                for table in held.tables:
                    self.pool.release(table[-spare:])
                    del table[-spare:]
                held.capacity -= spare * self._size


SCHEDULER_BUGS = (
    RejectedTokenStaysCached,
    LengthOnlyGrows,
    RightGuessesComputedAgain,
    GuessesBehindAnUnknownToken,
    RunsOnBeforeTheResult,
    GuessesOutliveTheirToken,
    GuessesSurvivePreemption,
    TokensBehindAStop,
    GuessesBehindTheLimit,
    GuessesOverTheBudget,
    GuessesWithoutBlocks,
    StatesSavedBehindGuesses,
    BlocksOfGuessesForgotten,
)


# ------------------------------------------------------------------------------------------- device


class StateNotRestored(FakeDevice):
    def _take_back(self, state: SlotState, chunk: Chunk, computed: int, states: Sequence[int]) -> None:
        super()._take_back(state, chunk, computed, states)
        self._recurrent[chunk.slot] = states[-1]


class RejectedIdStays(FakeDevice):
    def _take_back(self, state: SlotState, chunk: Chunk, computed: int, states: Sequence[int]) -> None:
        ids = list(state.ids)
        super()._take_back(state, chunk, computed, states)
        state.ids[:] = ids[: max(computed, len(ids) - 1)]


class RejectedCellStays(FakeDevice):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.written: dict[int, int] = {}  # by slot: positions that were computed, with guesses

    def _take_back(self, state: SlotState, chunk: Chunk, computed: int, states: Sequence[int]) -> None:
        super()._take_back(state, chunk, computed, states)
        self.written[state.epoch] = chunk.start + chunk.count

    def _write(self, state: SlotState, group: int, position: int, cell: int) -> None:
        if position >= self.written.get(state.epoch, 0):
            super()._write(state, group, position, cell)


class EveryGuessIsRight(FakeDevice):
    def _count_right(self, guesses: Sequence[int], drawn: Sequence[int]) -> int:
        return len(guesses)


class GuessesCountBehindAWrongOne(FakeDevice):
    def _count_right(self, guesses: Sequence[int], drawn: Sequence[int]) -> int:
        return sum(guess == token for guess, token in zip(guesses, drawn, strict=False))


DEVICE_BUGS = (
    StateNotRestored,
    RejectedIdStays,
    RejectedCellStays,
    EveryGuessIsRight,
    GuessesCountBehindAWrongOne,
)
