"""Counters since start. They only grow; gauges are read where they live."""

from __future__ import annotations


class Counters:
    """`prefix_*` count tokens of requests that were looked up at their first admission."""

    __slots__ = (
        "corrupted_requests",
        "generation_tokens",
        "last_step_tokens",
        "preemptions",
        "prefix_hits",
        "prefix_queries",
        "prompt_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.corrupted_requests = 0
        self.generation_tokens = 0
        self.last_step_tokens = 0
        self.preemptions = 0
        self.prefix_hits = 0
        self.prefix_queries = 0
        self.prompt_tokens = 0  # of requests that produced their first token
        self.steps = 0
