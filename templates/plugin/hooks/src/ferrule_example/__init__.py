"""Answers and tokens, counted by how the answer ended, and a word about it on the log's first screen."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from ferrule.config import ServerSettings
from ferrule.interfaces.hooks import Hooks
from ferrule.interfaces.stats import RequestStats


class ExampleHooks(Hooks):
    """An example of hooks: override the events that you want. The server does not call the others, so they cost
    nothing.
    """

    def __init__(self) -> None:
        self._answers: Counter | None = None
        self._tokens: Counter | None = None

    def register_metrics(self, registry: CollectorRegistry) -> None:
        self._answers = Counter("ferrule_answers", "Answers that ended.", ["reason"], registry=registry)
        self._tokens = Counter("ferrule_answer_tokens", "Their tokens.", ["reason"], registry=registry)

    def request_finished(self, request_id: str, stats: RequestStats) -> None:
        if self._answers is not None and self._tokens is not None:
            self._answers.labels(str(stats.finish)).inc()
            self._tokens.labels(str(stats.finish)).inc(stats.generation_tokens)

    def report_header(self, config: ServerSettings) -> Sequence[str]:
        return ["answers are counted by how they ended"]
