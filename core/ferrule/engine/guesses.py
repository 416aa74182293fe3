"""`Guesses`: which guesses of next tokens go into a step.

A row that computes guesses is planned again only when its result is known; all others overlap as ever. The guesses
travel with results and plans, though the runner makes them: the row waits for its result in any case, a plan then says
all that a step computes, and constraints are followed by ids that the host knows.

A guess is right if it is the token that would have been sampled, with the same noise, so guesses change no output.
Rejection sampling would accept a few more where a speculator knows its own probabilities, but the same seed would give
another text with and without guesses; a sampler may still do so (`Sampler.verify`).
"""

from __future__ import annotations

from ferrule.engine.request import Request
from ferrule.types import StepPlan


class Guesses:
    """The rule of which plans have guesses: at most one plan with guesses is in flight.

    So all requests that have guesses go into the next one together, and not each into a step of its own.
    """

    def __init__(self) -> None:
        self._in_flight = 0  # the step that has guesses; 0: none
        self._room = 0  # tokens of the plan that is being made which guesses may still have
        self._used = False  # the plan that is being made has guesses

    def begin(self, budget: int, running: int) -> None:
        """Begin with a plan of so many tokens, of which each request that runs may need one."""
        self._room, self._used = (budget - running) // 2, False

    def wait(self, request: Request) -> bool:
        """Return whether a result in flight decides which of the request's guesses are right, or what they follow."""
        return self._in_flight > 0 or request.sent > request.confirmed

    def choose(self, request: Request, room: int) -> int:
        """Keep of a request's guesses those that go into the plan, behind its last token; return how many these are.

        They fit into the step and into `room` positions, the most that the request may have, and end before the border
        where states are due.
        """
        known = request.known
        positions = min(request.limit - 1, room) - known
        count = max(0, min(len(request.guesses), self._room, positions, request.borders.room(known)))
        request.guesses = request.guesses[:count]
        self._room -= count
        self._used = self._used or count > 0
        return count

    def sent(self, plan: StepPlan) -> None:
        if self._used:
            self._in_flight = plan.step

    def end(self, plan: StepPlan) -> None:
        """Note that the result of a plan is known."""
        if self._in_flight == plan.step:
            self._in_flight = 0
