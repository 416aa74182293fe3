"""A sampler before another one, which stops a model that says one token over and over."""

from __future__ import annotations

from dataclasses import replace

import torch
from msgspec.structs import replace as changed

from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler, SampleRow

LONGEST = 8  # tokens of one kind in a row


class ExampleSampler(Sampler):
    """A sampler that bans what would continue a loop, and leaves drawing to the default sampler."""

    def __init__(self, plugins: Plugins) -> None:
        super().__init__(plugins)
        self._inner: Sampler = plugins.make("sampler", "default", plugins)

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        rows = [self._without_loop(row, batch.history) for row in batch.rows]
        return self._inner.sample(logits, replace(batch, rows=rows))

    def _without_loop(self, row: SampleRow, history: torch.Tensor) -> SampleRow:
        if row.position - row.num_prompt < LONGEST:
            return row
        last = history[row.slot, row.position - LONGEST : row.position].tolist()
        if len(set(last)) > 1:
            return row
        banned = (*row.sampling.bad_words, (int(last[0]),))
        return replace(row, sampling=changed(row.sampling, bad_words=banned))
