"""`stat_logger`: where figures go. Called in the API process, off the token path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ferrule.types import EngineStats, FinishReason, Guesses, ModelInfo, RequestTimes

if TYPE_CHECKING:
    from ferrule.config import StatSettings


class RequestStats(Struct, frozen=True, kw_only=True):
    """One finished choice, as the frontend saw it. Times are durations in seconds."""

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
    longest: int | None = None  # with the last of a prompt's n choices: the most tokens that one of them has
    called_tools: bool | None = None  # None: no tool parser read the choice
    streamed: bool = True
    key_name: str = ""  # of the API key that the request came with
    times: RequestTimes | None = None  # instants in the engine
    guesses: Guesses | None = None  # of next tokens, where there were some
    error: str | None = None  # with finish ERROR, where the engine has said why


class HttpStats(Struct, frozen=True, kw_only=True):
    """One HTTP call that was answered. Both names come from closed sets: no client can make a new one."""

    route: str  # a template of ours, or "none"
    method: str  # or "OTHER"
    status: int  # 499: the client left before its answer
    seconds: float  # a stream's, to its end
    received: int  # bytes of the body that were read
    sent: int  # bytes of the answer's body


class StatLogger(ABC):
    def __init__(self, config: StatSettings, model: ModelInfo) -> None:
        self.config = config
        self.model = model

    def share(self, folder: Path, number: int) -> None:
        """Share figures with other processes, in the first call. `number` is this API process's, from 0.

        All API processes may write to `folder`, which is theirs alone and goes with them, so that each can show the sum
        of what all were told. The figures of an engine are told in the first process only.
        """

    def follow(self, folder: Path) -> None:
        """Show in `exposition` what the instances that share `folder` were told: the first call, with `--probe-port`.

        This instance is the launcher's, and is told nothing itself. Where a logger that shows something does not
        override this, that port has no figures.
        """

    @abstractmethod
    def on_engine(self, stats: EngineStats, engine: int) -> None:
        """Take an engine's figures, at most once a step and at least once a second while there is work."""

    @abstractmethod
    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        """Note that a delta of one request arrived `gap` seconds after its admission (`first`) or its last delta."""

    @abstractmethod
    def on_finish(self, stats: RequestStats) -> None:
        """Note that a choice ended."""

    def on_rejected(self, reason: str) -> None:
        """Note that a request was refused because the queue is full: max_num_queued_reqs or max_num_queued_tokens."""

    def on_http(self, stats: HttpStats) -> None:
        """Note that an HTTP call was answered. Called also with --disable-log-stats, where nothing else is told."""

    def on_stall(self, seconds: float) -> None:
        """Note that the API process's event loop was late by `seconds`: nothing else could be done meanwhile."""

    def exposition(self) -> tuple[str, str] | None:
        """Return (media type, text) for ``GET /metrics``, or None. The texts of all loggers follow each other."""
        return None
