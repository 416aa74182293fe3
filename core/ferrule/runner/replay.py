"""Steps of one model that the device replays from recordings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.platform import Recorder, StepInput
from ferrule.runner.step import Bindings, Rows, StepContext

_MOST_TOKENS = 64  # of a step with several tokens in a row: beyond, Python is a small part of it

Given = Callable[[Rows, int], list[StepInput]]  # the inputs of rows, for contexts of up to so many tokens
Forward = Callable[[StepContext], torch.Tensor]
Keep = Callable[[], Callable[[], None]]


class Replays:
    """The recordings of a model's steps, if there is a recorder. `max_len` is the longest context, in tokens."""

    def __init__(self, recorder: Recorder | None, attention: AttentionBackend, max_len: int) -> None:
        self.recorder = recorder
        self._longest = 0 if recorder is None else min(recorder.max_len, max_len)
        self._ragged = recorder is not None and recorder.ragged and attention.ragged

    def run(
        self, rows: Rows, bound: Bindings, given: Given, forward: Forward, keep: Keep | None = None
    ) -> torch.Tensor | None:
        """Return the hidden states of a step, or None where no such step is recorded.

        `keep` is that of `Recorder.run_stateful`, for a model with states, whose rows have one token each.
        """
        recorder, tokens, single = self.recorder, len(rows.positions), rows.single
        ragged = self._ragged and tokens <= _MOST_TOKENS and keep is None
        if recorder is None or rows.longest > self._longest or not (single or ragged):
            return None
        compute = self._computing(bound, forward, None if single else tuple(rows.counts.tolist()))
        inputs = given(rows, self._longest)
        return recorder.run(inputs, compute) if keep is None else recorder.run_stateful(inputs, compute, keep)

    def warm(self, bound: Bindings, given: Given, forward: Forward) -> bool:
        """Record what start-up has time for. Returns whether there is more."""
        if self.recorder is None:
            return False
        return bool(self.recorder.warm(given(Rows.of(()), self._longest), self._computing(bound, forward, None)))

    def forget(self) -> None:
        """Drop the recordings, which read weights and cache at their present addresses."""
        if self.recorder is not None:
            self.recorder.forget()

    def _computing(
        self, bound: Bindings, forward: Forward, counts: tuple[int, ...] | None
    ) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        """Return the function that is recorded, for rows with so many tokens; None: with one each, however many they
        are.
        """

        def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
            lengths = counts or (1,) * len(inputs[0])
            return forward(StepContext(bound, inputs, lengths, (self._longest,) * len(lengths)))

        return compute
