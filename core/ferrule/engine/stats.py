"""Counters since start. They only grow; gauges are read where they live."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from ferrule.engine.request import Request
from ferrule.types import Chunk, Guesses


@dataclass
class Counters:
    """Fields of `EngineStats`. `prefix_*` count tokens of requests that were looked up at their first admission."""

    corrupted_requests: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    prompt_cached: int = 0  # of prompt_tokens, found in the prefix cache
    prompt_tokens: int = 0  # of requests that produced their first token
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_by_place: tuple[int, ...] = ()

    def count_guesses(self, request: Request, chunk: Chunk, right: int) -> None:
        """Count the guesses of a chunk, of which the first ones were right, for its request too."""
        if not chunk.drafts:
            return
        self.drafts += 1
        self.draft_tokens += chunk.drafts
        self.accepted_by_place = add_places(self.accepted_by_place, (1,) * right)
        past = request.guessed or Guesses(0, 0, ())
        places = add_places(past.accepted_by_place, (1,) * right)
        request.guessed = Guesses(past.drafts + 1, past.draft_tokens + chunk.drafts, places)

    def count_lookup(self, request: Request) -> None:
        """Count a request that begins, if it is its first life and the cache was asked for its prompt."""
        if request.cached < 0 and request.chain is not None and request.reads_cache:
            self.prefix_queries += request.num_prompt
            self.prefix_hits += request.found

    def count_prompt(self, request: Request) -> None:
        """Count the prompt of a request that produced its first token, or its vector."""
        self.prompt_tokens += request.num_prompt
        self.prompt_cached += max(0, request.cached)


def add_places(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Add counts by place, of which one list may be longer."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))
