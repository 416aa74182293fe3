"""`stat_logger`: where figures go. Called in the API process, off the token path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from msgspec import Struct

from ferrule.types import EngineStats, FinishReason, ModelInfo

if TYPE_CHECKING:
    from ferrule.config import Config


class RequestStats(Struct, frozen=True, kw_only=True):
    """One finished request, as the frontend saw it. Times are durations in seconds."""

    finish: FinishReason
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    max_tokens: int
    n: int
    time_to_first_token: float
    end_to_end: float
    queue_time: float
    inference_time: float
    prefill_time: float
    decode_time: float
    num_preemptions: int = 0


class StatLogger(ABC):
    def __init__(self, config: Config, model: ModelInfo) -> None:
        self.config = config
        self.model = model

    @abstractmethod
    def on_engine(self, stats: EngineStats, engine: int) -> None:
        """At most once a step and at least once a second while there is work."""

    @abstractmethod
    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        """A delta of one request arrived `gap` seconds after its admission (`first`) or its last delta."""

    @abstractmethod
    def on_finish(self, stats: RequestStats) -> None:
        """A request ended."""

    def exposition(self) -> tuple[str, str] | None:
        """(media type, text) for ``GET /metrics``, or None. Those of all loggers follow each other."""
        return None
