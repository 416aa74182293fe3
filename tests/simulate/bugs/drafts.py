"""Planted bugs about guesses: in the scheduler, and on the device, which takes the wrong ones back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any

from msgspec.structs import replace

from ferrule.engine.cache import BlockDelta, KVCacheManager
from ferrule.engine.guesses import Guesses
from ferrule.engine.request import Request
from ferrule.engine.scheduler import DefaultScheduler, Draft
from ferrule.engine.snapshots import NOWHERE
from ferrule.types import Chunk, EngineRequest, FinishReason, RequestDelta, RowResult
from ferrule_testkit.fakes import FakeDevice, SlotState
from tests.simulate.bugs.cache import Patched


class OtherRequests(DefaultScheduler):
    """A scheduler with requests of a subclass with a mistake."""

    request_cls: type[Request] = Request

    def add(self, request: EngineRequest, now: float) -> None:
        super().add(request, now)
        self._requests[request.id].__class__ = self.request_cls


class OtherGuesses(DefaultScheduler):
    """A scheduler that chooses guesses by a subclass with a mistake."""

    guesses_cls: type[Guesses] = Guesses

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._guesses = self.guesses_cls(self.limits.guesses)


# ------------------------------------------------------------------------------------------- scheduler


class RejectedTokenStaysCached(Patched):
    """A scheduler that publishes the block that the first wrong guess has filled, under the token that came instead."""

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


class RunsOnBeforeTheResult(OtherGuesses):
    class guesses_cls(Guesses):
        def wait(self, request: Request) -> bool:
            return False


class GuessesOutliveTheirToken(OtherGuesses):
    class guesses_cls(Guesses):
        def credit(self, request: Request, chunk: Chunk, row: RowResult) -> None:
            before = request.guesses
            super().credit(request, chunk, row)
            request.guesses = request.guesses or before


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


class GuessesBehindTheLimit(OtherGuesses):
    class guesses_cls(Guesses):
        def choose(self, request: Request, room: int) -> int:
            limit, request.limit = request.limit, request.limit + 2
            try:
                return super().choose(request, room)
            finally:
                request.limit = limit


class GuessesOverTheBudget(OtherGuesses):
    class guesses_cls(Guesses):
        def choose(self, request: Request, room: int) -> int:
            self._room = 100
            return super().choose(request, room)


class GuessesWithoutBlocks(OtherGuesses):
    class guesses_cls(Guesses):
        def choose(self, request: Request, room: int) -> int:
            super().choose(request, room)
            return 0


class StatesSavedBehindGuesses(OtherGuesses):
    class guesses_cls(Guesses):
        def choose(self, request: Request, room: int) -> int:
            borders, request.borders = request.borders, NOWHERE
            try:
                return super().choose(request, room)
            finally:
                request.borders = borders


class AsksBehindTheLongest(OtherGuesses):
    class guesses_cls(Guesses):
        def wanted(self, request: Request) -> int:
            limits, self._limits = self._limits, replaced(self._limits, max_len=0)
            try:
                return super().wanted(request)
            finally:
                self._limits = limits


class AsksInACrowd(OtherGuesses):
    class guesses_cls(Guesses):
        def begin(self, budget: int, running: int, waiting: int) -> None:
            super().begin(budget, running, 0)


class AsksForTooMany(OtherGuesses):
    class guesses_cls(Guesses):
        def wanted(self, request: Request) -> int:
            return 2 * super().wanted(request)


class AsksOfPrompts(DefaultScheduler):
    """A scheduler that asks for guesses at what follows a part of a prompt."""

    def _send(self, request: Request, count: int, blocks: BlockDelta, draft: Draft) -> None:
        super()._send(request, count, blocks, draft)
        draft.chunks[request.id] = replace(draft.chunks[request.id], wanted=self.limits.guesses.most)


class EachPlaceCountsAlike(DefaultScheduler):
    """A scheduler whose counters are shifted by a place where guesses were right."""

    def _credit(self, request: Request, chunk: Chunk, row: RowResult, now: float) -> RequestDelta | None:
        if len(row.token_ids) > 1:
            self.counters.accepted_by_place = (0, *self.counters.accepted_by_place)
        return super()._credit(request, chunk, row, now)


class LooksBeyondTheLimit(OtherGuesses):
    class guesses_cls(Guesses):
        def lookahead(self, request: Request, end: int) -> int:
            return self._limits.lookahead


class BlocksAheadAreLost(Patched):
    """A scheduler that gives back what its requests have computed, and not the blocks behind."""

    class cache_cls(KVCacheManager):
        def release(self, id: str) -> None:
            held = self._requests[id]
            if held.next_full + self._size <= held.capacity:
                for table in held.tables:
                    table.pop()
            super().release(id)


class BlocksOfGuessesForgotten(Patched):
    """A scheduler that takes blocks back when guesses were wrong, and does not tell the runner, whose table still has
    them.
    """

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
    RunsOnBeforeTheResult,
    GuessesOutliveTheirToken,
    GuessesSurvivePreemption,
    TokensBehindAStop,
    GuessesBehindTheLimit,
    GuessesOverTheBudget,
    GuessesWithoutBlocks,
    StatesSavedBehindGuesses,
    AsksBehindTheLongest,
    AsksInACrowd,
    AsksForTooMany,
    AsksOfPrompts,
    EachPlaceCountsAlike,
    LooksBeyondTheLimit,
    BlocksAheadAreLost,
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
