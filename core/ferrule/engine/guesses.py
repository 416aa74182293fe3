"""`Guesses`: which guesses of next tokens are asked for, and which go into a step.

A row that computes guesses is planned again only when its result is known. All others wait with it, because a plan of
them alone would take as long as one of all. The guesses travel with results and plans, though the runner makes them:
the row waits for its result in any case, a plan then says all that a step computes, and constraints are followed by ids
that the host knows.

A guess is right if it is the token that would have been sampled, with the same noise, so guesses change no output.
Rejection sampling would accept a few more where a speculator knows its own probabilities, but the same seed would give
another text with and without guesses; a sampler may still do so (`Sampler.verify`).

How many are asked for depends on the load, see `Loads`, and on the request: of a row of guesses, each counts only if
those before it did, so the n-th is right with the n-th power of the chance of one. A request whose guesses fail is
left alone for some tokens, and then tried again. So is one for which a speculator finds none to make: asking costs a
step its place beside the one before it. Where no request has had any for long, a new one is seldom asked for, too.

Recurrent states cannot be undone: after a wrong guess the runner computes the tokens that counted once more, from where
the states are certain. Each chunk with a wrong guess leaves them there, so after some tokens a chunk without guesses
moves them on.
"""

from __future__ import annotations

from math import log
from sys import maxsize

from ferrule.engine.costs import StepCosts, work
from ferrule.engine.guess_loads import NEVER, Loads
from ferrule.engine.request import Request
from ferrule.interfaces.scheduler import GuessLimits
from ferrule.types import Chunk, RowResult, StepPlan, StepResult

_KEPT = 0.8  # of what is known of a request, with each result
_PRIOR = 2.0  # guesses: how much the usual share of right ones weighs beside a request's own
_USUAL = 0.7  # share of right guesses before any was made
_TRIAL = 2  # guesses for a request whose guesses may not pay
_SHORT, _LONG = 4, 64  # tokens without guesses, after some that did not pay
_REDONE = 16  # tokens that a row with guesses may compute again, because states stay where they were certain
_MOST_BESIDE = 0.75  # of a step's time for its prompts: one with more says little of the rest, and is not measured
_SEARCH = 16  # tokens without asking, where a speculator has had no idea for a while
_HEARSAY = 4  # times that others asked in vain count like one of a request's own


class Guesses:
    """The rule of which plans have guesses."""

    def __init__(self, limits: GuessLimits | None = None, recurrent: bool = False) -> None:
        """Begin without experience. `recurrent`: the model has states that tokens are added to."""
        self._limits = limits or GuessLimits()
        self._redone = _REDONE if recurrent else maxsize
        self._loads = Loads()
        self._room = 0  # tokens of the plan that is being made which guesses may still have
        self._most = 0  # guesses that a request may ask for in this plan
        self._bar = 0.0  # the chance that a guess must have to be asked for
        self._right, self._tried = _USUAL * _PRIOR, _PRIOR  # of all requests, fading
        self._empty = 0  # times that none came, of all requests, since some last came

    def begin(self, budget: int, running: int, waiting: int) -> None:
        """Begin with a plan of so many tokens, of which each request that runs may need one."""
        self._room, limits = (budget - running) // 2, self._limits
        crowded = limits.max_requests and running + waiting > limits.max_requests
        self._most = 0 if crowded else limits.most
        self._bar = self._loads.bar(max(1, running)) if limits.adaptive and self._most else 0.0

    def wait(self, request: Request) -> bool:
        """Return whether a result in flight decides which of the request's guesses are right, or what they follow."""
        return bool(request.guesses) and request.sent > request.confirmed

    def choose(self, request: Request, room: int) -> int:
        """Keep of a request's guesses those that go into the plan, behind its last token; return how many these are.

        They fit into the step and into `room` positions, the most that the request may have, and end before the border
        where states are due.
        """
        known = request.known
        positions = min(request.limit - 1, room) - known
        count = max(0, min(len(request.guesses), self._room, positions, request.borders.room(known)))
        if known - 1 - request.certain > self._redone:
            count = 0
        request.guesses = request.guesses[:count]
        self._room -= count
        return count

    def lookahead(self, request: Request, end: int) -> int:
        """Return how many positions from `end` on a speculator could write to, for a row that ends there."""
        samples = end >= request.known and request.ends == "sample"
        return max(0, min(self._limits.lookahead, request.limit - 1 - end)) if samples else 0

    def wanted(self, request: Request) -> int:
        """Return how many guesses to ask for at what follows the token that a row is about to sample."""
        known, limits, luck = request.known, self._limits, request.luck
        most = min(self._most, request.limit - 1 - known)
        most = min(most, limits.max_len - known) if limits.max_len else most
        if most <= 0 or not limits.adaptive:
            return max(0, most)
        if self._bar >= NEVER or known < luck.resume:
            return 0
        return min(most, max(_TRIAL, self._worth(request, most)))

    def _worth(self, request: Request, most: int) -> int:
        """Return how many guesses have a chance above the bar."""
        chance = self._chance(request)
        if chance <= self._bar:
            return 0
        return most if self._bar <= 0 or chance >= 1 else min(most, int(log(self._bar) / log(chance)))

    def _chance(self, request: Request) -> float:
        luck, usual = request.luck, self._right / self._tried
        return (luck.right + _PRIOR * usual) / (luck.tried + _PRIOR)

    def end(self, plan: StepPlan, result: StepResult, seconds: float, costs: StepCosts) -> None:
        """Note that a step took so long. `costs` say how much of that was for its prompts."""
        if not (self._limits.most and self._limits.adaptive):
            return
        prompts = [chunk for chunk in plan.chunks if not _decodes(chunk)]
        beside = costs.seconds(work(prompts)._replace(any=0.0)) if prompts else 0.0
        rows = len(plan.chunks) - len(prompts)
        if rows and beside <= _MOST_BESIDE * seconds:
            tokens = sum(
                len(row.token_ids) for chunk, row in zip(plan.chunks, result.rows, strict=True) if _decodes(chunk)
            )
            guesses, asked = sum(chunk.drafts for chunk in plan.chunks), any(chunk.wanted for chunk in plan.chunks)
            self._loads.observe(rows, bool(guesses) or asked, guesses, tokens, seconds - beside)

    def credit(self, request: Request, chunk: Chunk, row: RowResult) -> None:
        """Settle which of a chunk's guesses were right, learn from it, and take over those of what follows."""
        request.guesses = row.drafts[: chunk.wanted]
        luck = request.luck
        if chunk.drafts:
            right = len(row.token_ids) - 1
            request.settle(chunk.drafts, right)
            tried = min(chunk.drafts, right + 1)
            luck.right, luck.tried = _KEPT * luck.right + right, _KEPT * luck.tried + tried
            self._right, self._tried = 0.99 * self._right + right, 0.99 * self._tried + tried
            if self._chance(request) > self._bar:
                luck.patience = _SHORT
            else:
                luck.resume = request.known + luck.patience
                luck.patience = min(2 * luck.patience, _LONG)
        if request.guesses:
            luck.empty = self._empty = 0
        elif chunk.wanted:
            luck.empty += 1
            self._empty += 1
            empty = max(luck.empty, self._empty // _HEARSAY)
            luck.resume = max(luck.resume, request.known + min(empty // 2, _SEARCH))


def _decodes(chunk: Chunk) -> bool:
    """Return whether a row goes on by one token and its guesses, and is not a piece of a prompt."""
    return bool(chunk.ends) and chunk.count == 1 + chunk.drafts
