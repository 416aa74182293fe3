"""What the average hides: the longest wait for a first token, and the longest silence within an answer."""

from __future__ import annotations

from ferrule.config import StatSettings
from ferrule.interfaces.stats import RequestStats, StatLogger
from ferrule.types import EngineStats, ModelInfo

_FIGURES = (
    ("ferrule_longest_wait_seconds", "Longest time from admission to a first token."),
    ("ferrule_longest_gap_seconds", "Longest time between two deltas of one answer."),
)


class ExampleLogger(StatLogger):
    def __init__(self, config: StatSettings, model: ModelInfo) -> None:
        super().__init__(config, model)
        self._longest = [0.0, 0.0]  # as in _FIGURES

    def on_engine(self, stats: EngineStats, engine: int) -> None:
        """Ignore the engine's figures, which are not about single requests."""

    def on_tokens(self, first: bool, num_tokens: int, gap: float) -> None:
        which = 0 if first else 1
        self._longest[which] = max(self._longest[which], gap)

    def on_finish(self, stats: RequestStats) -> None:
        """Ignore the end of a request: all that matters was counted while the tokens came."""

    def exposition(self) -> tuple[str, str]:
        lines = []
        for (name, text), value in zip(_FIGURES, self._longest, strict=True):
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {value}", ""]
        return "text/plain", "\n".join(lines)
