"""Short prompts first; who waits moves up, so that a long prompt's turn comes too."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy

TOKENS_PER_SECOND = 10  # how many tokens of a prompt a second of waiting outweighs


class ExamplePolicy(SchedulingPolicy):
    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        # num_prompt - rate * (now - arrival), without `now`, which is the same for all: the order never changes.
        return (view.num_prompt + TOKENS_PER_SECOND * view.arrival, view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: (view.num_prompt, view.sequence)).id
