"""`Prefills`: how much of a step prompts get, and how many of them may be in progress at once.

The latter are the documented limits of chunked prefill. A prompt is in progress from its first piece to its last one; a
prompt that one step computes whole never is. With `max_num_partial_prefills` above 1 the prompts of a step share its
tokens evenly. With fewer `max_long_partial_prefills` than that, shorter prompts pass long ones that wait for another
long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ferrule.engine.queue import WaitingQueue
from ferrule.engine.request import Request
from ferrule.interfaces.scheduler import SchedulerLimits

_BURST = 8  # requests: fewer are not a burst
_LEAST_SHARED = 32  # requests that decode: prompts get no less than they would beside so many
_LOOK_AHEAD = 64  # waiting requests that a step looks at, at most
_LONG_PART = 25  # a prompt of more than 1/25 of the context is long, where no threshold is set


class Prefills:
    """Answers from the requests that it is shown; it keeps no state."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._most = limits.max_num_partial_prefills
        self._most_long = min(limits.max_long_partial_prefills, self._most)
        self._threshold = limits.long_prefill_token_threshold or limits.max_model_len // _LONG_PART

    def budget(self, prefills: Sequence[Request], waiting: WaitingQueue, decoding: int, slots: int, budget: int) -> int:
        """Tokens for all prompts of a step, of the `budget` that those which decode have left.

        `decoding` requests are in the step already, and `slots` are free.
        """
        if not (self._limits.prompt_share and decoding and self._limits.chunked_prefill):
            return budget
        if len(waiting) <= slots and _burst([*prefills, *waiting], decoding, budget):
            return budget  # those that decode wait for prompts
        return min(budget, self._limits.prompt_share * max(_LEAST_SHARED, decoding))

    def piece(self, request: Request, start: int, budget: int) -> int:
        """How many of a prompt's tokens from `start` on to compute now; 0 when it must wait."""
        todo = request.known - start
        if not self._limits.chunked_prefill:
            return todo if todo <= budget else 0
        count = min(todo, budget, self._limits.long_prefill_token_threshold or todo)
        return request.borders.end(start, start + count, request.known) - start

    def full(self, running: Iterable[Request]) -> bool:
        """True when no more prompts may be in progress."""
        return sum(request.prefilling for request in running) >= self._most

    def next(self, running: Iterable[Request], waiting: WaitingQueue) -> Request | None:
        """Whose turn it is: the head of the queue, or the first one behind long prompts that wait for another one."""
        if self._most_long < self._most:
            long = sum(request.prefilling and self._is_long(request) for request in running)
            if long >= self._most_long:
                ahead = islice(waiting, _LOOK_AHEAD)
                return next((each for each in ahead if each.exclusive or not self._is_long(each)), None)
        return waiting.head()

    def share(self, prefills: Sequence[Request], waiting: WaitingQueue, budget: int) -> int:
        """Tokens for each prompt of a step: an even part of the budget for each that is or could be in progress."""
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


def _burst(prompts: Sequence[Request], decoding: int, budget: int) -> bool:
    """Whether far more requests lack a first token than decode, and two steps give it to all of them."""
    return len(prompts) >= max(_BURST, 4 * decoding) and sum(request.todo for request in prompts) <= 2 * budget
