"""Counters since start. They only grow; gauges are read where they live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
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
