"""Short prompts first; who waits moves up, so that a long prompt's turn comes too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy


class ExamplePolicy(SchedulingPolicy):
    @dataclass(frozen=True)
    class Options:
        tokens_per_second: Annotated[
            float, Meta(ge=0, description="How many tokens of a prompt a second of waiting outweighs.")
        ] = 10.0

    def __init__(self, options: Options) -> None:
        self.options = options

    def key(self, view: RequestView, now: float) -> tuple[float, ...]:
        # num_prompt - rate * (now - arrival), without `now`, which is the same for all: the order never changes.
        return (view.num_prompt + self.options.tokens_per_second * view.arrival, view.sequence)

    def victim(self, running: Sequence[RequestView]) -> str:
        return max(running, key=lambda view: (view.num_prompt, view.sequence)).id
