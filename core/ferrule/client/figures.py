"""The engine's figures across restarts: the counters of a dead engine are added to those of the next."""

from __future__ import annotations

from msgspec.structs import replace

from ferrule.engine.stats import add_places
from ferrule.types import EngineStats

_COUNTERS = (
    *("prefix_queries", "prefix_hits", "preemptions", "prompt_tokens", "prompt_cached", "generation_tokens", "steps"),
    *("drafts", "draft_tokens", "corrupted_requests", "restarts"),
)


def with_past(past: EngineStats, stats: EngineStats) -> EngineStats:
    """Return the figures of the running engine, with the counters of the engines before it added."""
    places = add_places(past.accepted_by_place, stats.accepted_by_place)
    totals = {name: getattr(past, name) + getattr(stats, name) for name in _COUNTERS}
    return replace(stats, **totals, accepted_by_place=places)


def past_of(stats: EngineStats) -> EngineStats:
    """Return the part of the figures that outlives their engine: the counters, with one more restart."""
    totals = {name: getattr(stats, name) + (name == "restarts") for name in _COUNTERS}
    return EngineStats(**totals, accepted_by_place=stats.accepted_by_place)
