"""`console`: a line of throughput in the log every ten seconds while there is work, and one of guesses if there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import zip_longest

from ferrule import log
from ferrule.config import StatSettings
from ferrule.interfaces.stats import RequestStats, StatLogger
from ferrule.types import EngineStats, ModelInfo

_INTERVAL = 10.0  # seconds

_logger = log.get("stats")


class Console(StatLogger):
    """A regular line in the log. `clock` counts seconds, monotonic."""

    def __init__(self, config: StatSettings, model: ModelInfo, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, model)
        self._clock = clock
        self._last: dict[int, tuple[float, EngineStats]] = {}  # engine → when and what the last line said

    def on_engine(self, stats: EngineStats, engine: int) -> None:
        if self.config.observability.disable_log_stats:
            return
        now = self._clock()
        when, before = self._last.setdefault(engine, (now, stats))
        if now - when < _INTERVAL:
            return
        self._last[engine] = (now, stats)
        if stats.steps == before.steps and not stats.running and not stats.waiting:
            return
        seconds = now - when
        queries = stats.prefix_queries - before.prefix_queries
        hits = (stats.prefix_hits - before.prefix_hits) / queries if queries else 0.0
        _logger.info(
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            engine,
            (stats.prompt_tokens - before.prompt_tokens) / seconds,
            (stats.generation_tokens - before.generation_tokens) / seconds,
            stats.running,
            stats.waiting,
            stats.cache_usage * 100,
            hits * 100,
        )
        if stats.draft_tokens > before.draft_tokens:
            drafts, guesses = stats.drafts - before.drafts, stats.draft_tokens - before.draft_tokens
            accepted = stats.accepted_tokens - before.accepted_tokens
            past = before.accepted_by_place
            places = [now - then for now, then in zip_longest(stats.accepted_by_place, past, fillvalue=0)]
            _logger.info(
                "Engine %03d: SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
                "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, Per-position acceptance "
                "rate: %s, Avg Draft acceptance rate: %.1f%%",
                engine,
                1 + accepted / drafts,
                accepted / seconds,
                guesses / seconds,
                accepted,
                guesses,
                ", ".join(f"{right / drafts:.3f}" for right in places),
                100 * accepted / guesses,
            )

    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        """Do nothing: the line is made from the engine's statistics."""

    def on_finish(self, stats: RequestStats) -> None:
        """Do nothing: the line is made from the engine's statistics."""
