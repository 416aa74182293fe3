"""`Pace`: how long a step may become for prompts, while requests wait for their next token in it.

A step in which requests decode takes `plain` seconds. Each token of a prompt in it makes it longer, and all those that
decode wait for that; but with fewer of them a prompt needs more steps, each of which takes `plain` too. So a first
token comes the sooner, the longer the gaps between the others' tokens are. Where a wish is given, it decides:

- A target between tokens is what a step may take.
- Targets of first tokens ask for the speed that the most urgent one of them needs, of those that can be met at all.
- A prompt without a target, and one whose target cannot be met, asks for a balance. Let W prompts be left, which take S
  seconds, u of them in a step of g = plain + u. The last one waits for T = S/u·g. On average they wait for half of T,
  and of a step, since first tokens come at its end, or of what a prompt takes, if that is longer: T/W. The mean of the
  average and the last counts for each of the W. D requests have S/u gaps of g, which count with their square: many
  short gaps hurt less than a long one. With GAP for the wait that one gap of GAP seconds is worth, the sum of both,
  S/u·D·g²/GAP + W·(3·T + max(g, T/W))/4, is smallest at u = plain·√(1 + (3·W + 1)·GAP/(4·D·plain)) where a step has
  less than one prompt, and else at u = plain·√((1 + 3·W·GAP/(4·D·plain)) / (1 + W·GAP/(4·D·S))). For prompts whose
  first token is the last, and while no request decodes, that is √(3·S·plain). Prompts of others then get short steps:
  the fewer of them decode, the longer the next step may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf, sqrt

from ferrule.engine.costs import StepCosts, Work, work
from ferrule.engine.request import Request
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import StepPlan, Targets

_GAP = 32.0  # seconds
_ALONE = 4.0  # while no request decodes, a step of prompts may take this many times as long as an empty one
_LONGEST = 50.0  # and no longer than this, also where none will: 2 % of a long prompt's time, for those that come
_PIECE = 256  # tokens of a prompt that is cut for that, or more: the costs of a step may be learnt wrongly
_LEAST = 1.25  # of a plain step: what prompts get where a target is shorter, so that each of them ends
_SURE = 0.9  # of a target between tokens: what is planned, since steps differ from what they are expected to take
_SHARE = 0.8  # of a step: what an urgent prompt can have of it, since others decode
_LATE = 4.0  # times its target: from then on a request is not passed any more
_PATIENT = 2.0  # times what a prompt takes: until so long after its arrival others may pass it
_SHORT = 1e-6  # seconds: no step is shorter
_NONE = Targets()
_ROWS = 32  # as many tokens of a prompt, times `prompt_share`, take as long as the weights: a first guess


class Pace:
    """An estimate of step times that divides steps between prompts and decoding. Times are passed in, as to a
    scheduler.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.costs = StepCosts(_ROWS * (limits.prompt_share or 1))
        self._limits = limits
        self.active = bool(limits.prompt_share or limits.targets != _NONE) and limits.chunked_prefill
        self._begun: dict[int, float] = {}  # by the number of the step
        self._ended = -inf

    def begin(self, plan: StepPlan, now: float) -> None:
        self._begun[plan.step] = now

    def end(self, plan: StepPlan, now: float) -> float:
        """Learn from a step that ended, and return its seconds: since it began, or since the one before it ended."""
        seconds, self._ended = now - max(self._begun.pop(plan.step), self._ended), now
        if self.active:
            self.costs.observe(work(plan.chunks), seconds)
        return seconds

    def tokens(self, decoding: Iterable[Request], prompts: Sequence[Request], budget: int, now: float) -> int:
        """Return how many tokens of prompts, of at most `budget`, may join the requests that decode.

        `prompts` are in the order in which they are computed.
        """
        if not (self.active and prompts):
            return budget
        decoding = list(decoding)
        beside = Work(1.0, len(decoding), 0.0, sum(request.sent for request in decoding))
        plain = max(self.costs.seconds(beside), _SHORT)
        if not decoding:
            return min(budget, self._whole(plain, prompts))
        between = min(self._targets(request).inter_token or inf for request in decoding)
        most = max(_SURE * between, _LEAST * plain)
        wanted = min(self._wanted(plain, len(decoding), prompts, most, now), most)
        return min(budget, max(1, self._fitting(wanted - plain, most - plain, prompts)))

    def late(self, request: Request, now: float) -> bool:
        """Return whether a request's first token is sure to miss its target, while the request may still be passed for
        that.
        """
        target = self._targets(request).first_token
        if not (self.active and target) or request.first_token:
            return False
        end = now + self._cost(request) / _SHARE
        return end > request.spec.arrival + target and now < request.spec.arrival + _LATE * target

    def patient(self, request: Request, now: float) -> bool:
        """Return whether others may pass a prompt in progress: it has not waited for long compared with the time it
        takes.
        """
        begun = max(0, request.cached)
        return self.active and now < request.spec.arrival + _PATIENT * self._seconds(begun, request.known - begun)

    def _targets(self, request: Request) -> Targets:
        """Return a request's targets. It may ask for an earlier first token than others, but not for shorter gaps
        between tokens, for which all prompts would pay.
        """
        own, all = request.spec.targets, self._limits.targets
        return Targets(own.first_token or all.first_token, max(own.inter_token, all.inter_token))

    def _wanted(self, plain: float, rows: int, prompts: Sequence[Request], most: float, now: float) -> float:
        """Choose the length of a step, at most `most` seconds, by what the prompts wait for."""
        waiting, needed, ahead, speed = 0, 0.0, 0.0, 0.0  # speed: the part of a step that is for prompts
        for request in prompts:
            seconds = self._cost(request)
            cost = seconds / _SHARE
            target = 0.0 if request.first_token else self._targets(request).first_token
            left = request.spec.arrival + target - now if target else 0.0
            if left <= ahead + cost:
                waiting += 1
                needed += seconds
            else:
                ahead += cost
                speed = max(speed, ahead / left)
        if waiting and most < inf:
            return most
        balanced = plain + _balance(plain, rows, waiting, max(needed, _SHORT))
        return max(balanced, plain / (1 - speed)) if speed < 1 else inf

    def _whole(self, plain: float, prompts: Sequence[Request]) -> int:
        """Count the tokens of as many whole prompts as are worth a step, or of a part of one that is too long."""
        costs = [self._cost(request) for request in prompts]
        single = [cost for request, cost in zip(prompts, costs, strict=True) if request.limit == request.known + 1]
        count, longest = 0, _LONGEST * plain
        enough = max(_ALONE * plain, min(sqrt(3 * plain * sum(single)), longest))
        for request, cost in zip(prompts, costs, strict=True):
            if cost > longest:
                return count or min(request.left, max(_PIECE, ceil(request.left / ceil(cost / longest))))
            count += request.left
            enough -= cost
            if enough <= 0:
                break
        return count

    def _fitting(self, seconds: float, most: float, prompts: Sequence[Request]) -> int:
        """Return how many tokens of the prompts take about `seconds`, and no more than `most`.

        The last prompt may be cut, into equal pieces: a small rest would cost one more step before its first token.
        """
        count = 0
        for request in prompts:
            cost = self._cost(request)
            if cost >= seconds:
                pieces = max(1, round(cost / seconds), ceil(cost / most))
                return count + ceil(request.left / pieces)
            seconds -= cost
            most -= cost
            count += request.left
        return count

    def _cost(self, request: Request) -> float:
        return self._seconds(request.done, request.left)

    def _seconds(self, start: int, count: int) -> float:
        """Estimate the seconds that `count` tokens of a prompt add to a step, from position `start` on."""
        return self.costs.seconds((0.0, 0.0, count, count * (start + count / 2)))


def _balance(plain: float, rows: int, waiting: int, seconds: float) -> float:
    """Return the seconds of a step for `waiting` prompts, which take `seconds`, while `rows` requests decode: `u`
    above.
    """
    worth = _GAP / (4 * rows)
    part = plain * sqrt(1 + (3 * waiting + 1) * worth / plain) if waiting else plain
    if part * waiting <= seconds:
        return part
    part = plain * sqrt((1 + 3 * waiting * worth / plain) / (1 + waiting * worth / seconds))
    return max(part, seconds / waiting)
