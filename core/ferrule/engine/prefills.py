"""`Prefills`: how many prompts may be in progress at once, whose turn it is, and, by its `Pace`, how much they get.

How many is a documented limit of chunked prefill. A prompt is in progress from its first piece to its last one; a
prompt that one step computes whole never is. Where one may be, a short prompt can pass it, in several steps if it must:
the long one waits meanwhile. With `max_num_partial_prefills` above 1 the prompts of a step share its tokens evenly.
With fewer `max_long_partial_prefills` than that, shorter prompts pass long ones that wait for another long one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from ferrule.engine.cache import KVCacheManager
from ferrule.engine.encodings import Encodings
from ferrule.engine.pace import Pace
from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import Request
from ferrule.interfaces.scheduler import SchedulerLimits

_LOOK_AHEAD = 64  # waiting requests that a step looks at, at most
_SHORT_PART = 4  # a prompt of 1/4 of what is left of another one, or less, is short beside it
_ASKED = 2  # requests of which a step asks what is cached: that takes 25 ms for 128k tokens, once for each
_LONG_PART = 25  # a prompt of more than 1/25 of the context is long, where no threshold is set


class PromptOrder(NamedTuple):
    """The prompts in progress, between the waiting ones that pass them and those that come later."""

    passing: Sequence[Request]
    in_progress: Sequence[Request]
    behind: Sequence[Request]

    @property
    def prompts(self) -> list[Request]:
        return [*self.passing, *self.in_progress, *self.behind]


class Prefills:
    """The rules of which prompts are computed next. The only state is that of `pace`."""

    def __init__(self, limits: SchedulerLimits, encodings: Encodings) -> None:
        self.pace = Pace(limits)
        self._encodings = encodings
        self._limits = limits
        self._most = limits.max_num_partial_prefills
        self._most_long = min(limits.max_long_partial_prefills, self._most)
        self._threshold = limits.long_prefill_token_threshold or limits.max_model_len // _LONG_PART

    def order(
        self, begun: Sequence[Request], waiting: Iterable[Request], free_slots: int, cache: KVCacheManager, now: float
    ) -> PromptOrder:
        """Return the prompts in the order in which the next steps compute them: those `begun` and those that wait.

        A waiting prompt passes the one in progress when it is short, less what is cached of it, beside what is left of
        that one, which has neither waited for long nor is more urgent. Of two prompts in progress, the one that passed
        the other comes first.
        """
        heads = list(islice(waiting, min(free_slots, _LOOK_AHEAD)))
        for request in islice((each for each in heads if each.found < 0), _ASKED * self.pace.active):
            request.found = cache.match(request.chain, request.ids, request.reads_cache).tokens
        in_progress = begun[::-1] if self._most == 1 else begun
        if self._most > 1 or not (begun and all(self.pace.patient(each, now) for each in in_progress)):
            return PromptOrder([], in_progress, heads)
        first = in_progress[0]
        short, priority = first.todo // _SHORT_PART, first.spec.priority
        num_passing = sum(1 for _ in takewhile(lambda r: r.left <= short and r.spec.priority <= priority, heads))
        return PromptOrder(heads[:num_passing], in_progress, heads[num_passing:])

    def turns(self, prefills: Iterable[Request], admitted: Iterable[Request]) -> Iterator[Request]:
        """Yield the prompts in progress that get tokens, one after the other.

        Where only one may be in progress, the others wait as soon as a prompt that has tokens of this step, `admitted`
        ones included, is not computed to its end by them.
        """
        unfinished = any(request.prefilling for request in admitted)
        for request in prefills:
            if unfinished and self._most == 1:
                return
            before = request.sent
            yield request
            unfinished = request.prefilling and request.sent > before

    def piece(self, request: Request, start: int, budget: int) -> int:
        """Return how many of a prompt's tokens from `start` on to compute now; 0 when it must wait."""
        todo = request.known - start
        if not self._limits.chunked_prefill:
            count = todo if todo <= budget else 0
        else:
            count = min(todo, budget, self._limits.long_prefill_token_threshold or todo)
            count = request.borders.end(start, start + count, request.known) - start
        return self._encodings.reach(request, start, count) if request.media else count

    def first_piece(self, request: Request, budget: int, running: Iterable[Request], passes: bool) -> int:
        """Return how many of a waiting prompt's tokens to compute behind those found in the cache; 0: it must wait.

        It must when the step cannot compute it whole and no more prompts may be in progress. The one that it `passes`
        does not count: that one waits.
        """
        count = self.piece(request, request.found, budget)
        whole = request.found + count >= request.borders.whole(request.known)
        if whole or sum(each.prefilling for each in running) < self._most + passes:
            return count
        return 0

    def next(self, running: Collection[Request], waiting: WaitingQueue, now: float) -> Request | None:
        """Return the request to admit next: the head of the queue, or one that passes those before it.

        Long prompts are passed while they wait for another one, and requests whose first token comes too late in any
        case, if one behind them can be in time. None may begin beside a request that runs alone.
        """
        request = self._choose(running, waiting, now) if waiting else None
        if request is None or not running:
            return request
        return None if request.exclusive or next(iter(running)).exclusive else request

    def _choose(self, running: Iterable[Request], waiting: WaitingQueue, now: float) -> Request | None:
        long = self._most_long < self._most and (
            sum(request.prefilling and self._is_long(request) for request in running) >= self._most_long
        )
        head = waiting.head()
        if not (long or self.pace.late(head, now)):
            return head
        ahead = islice(waiting, _LOOK_AHEAD)
        ready = [each for each in ahead if each.exclusive or not (long and self._is_long(each))]
        in_time = (each for each in ready if each.exclusive or not self.pace.late(each, now))
        return next(in_time, ready[0] if ready else None)

    def share(self, prefills: Sequence[Request], waiting: WaitingQueue, budget: int) -> int:
        """Return the tokens for each prompt of a step: an even part of the budget for each that is or could be in
        progress.
        """
        if self._most == 1 or not self._limits.chunked_prefill:
            return budget
        count, long = len(prefills), sum(map(self._is_long, prefills))
        for request in islice(waiting, _LOOK_AHEAD):
            if self._is_long(request):
                if long >= self._most_long:
                    continue
                long += 1
            count += 1
        return -(-budget // max(1, min(count, self._most)))

    def _is_long(self, request: Request) -> bool:
        return request.num_prompt > self._threshold
