"""Choosing tokens on a GPU: a fixed number of launches for any batch, none of which the host waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrule.interfaces.sampler import Best, Chooser, Draws, Penalised, Reading
from ferrule_kernels.cuda import logits as adjusting
from ferrule_kernels.cuda import sampling
from ferrule_plugins.sampler.plan import Ranked


class TritonChooser(Chooser):
    """The `Chooser` of `ferrule_kernels.cuda`: logits are float32. Rows that are not finite stay as they are."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # zero between calls

    def warm(self, logits: torch.Tensor, history: torch.Tensor) -> None:
        """Compile every kernel, and take the memory that these rows can need at most while memory is measured.

        The logits' numbers do not matter. Waits for the device.
        """
        rows, vocab, device = *logits.shape, logits.device
        copy, every = logits.clone(), torch.arange(rows, device=device)
        draws = torch.tensor([[row, 0, 0.5, 0.9, 1.0, 0.0] for row in range(rows)], dtype=torch.float64, device=device)
        found = sampling.best(copy)
        sampling.draw(copy, found.most, draws, found.tokens, True)
        places = torch.tensor([[row, 0, 0, 0, 1, 1.0, 0.0, 0.0] for row in range(rows)], dtype=torch.float64)
        adjusting.penalise(copy, history, places.to(device), 1, self._reserve(rows, copy))
        adjusting.mask(copy, every, torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=device))
        adjusting.log_sum_exp(copy)
        adjusting.rank(copy, found.tokens)

    def best(self, logits: torch.Tensor) -> Best:
        found = sampling.best(logits)
        return Best(found.tokens, found.most, found.finite)

    def draw(self, logits: torch.Tensor, best: Best, draws: Draws) -> torch.Tensor:
        sampling.draw(logits, best.most, draws.there(), best.tokens, draws.filtered)
        return best.tokens

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        adjusting.mask(logits, rows, words)

    def penalise(self, logits: torch.Tensor, history: torch.Tensor, penalised: Penalised) -> None:
        counts = self._reserve(len(penalised.table), logits)
        adjusting.penalise(logits, history, penalised.there(), penalised.longest, counts)

    def _reserve(self, rows: int, logits: torch.Tensor) -> torch.Tensor:
        """Return zeros in which penalties of `rows` rows are counted."""
        vocab = logits.shape[1]
        if (
            self._counts is None
            or self._counts.shape[1] != vocab
            or len(self._counts) < min(rows, adjusting.room(vocab))
        ):
            self._counts = None  # before the new one: both need not fit
            self._counts = adjusting.count_buffer(rows, vocab, logits.device)
        return self._counts

    def rank(self, logits: torch.Tensor, rows: torch.Tensor | None, tops: Sequence[int], read: Reading) -> Ranked:
        """Rank tokens.

        Rows are copied where something will overwrite them; only reported log-probabilities are computed.
        """
        vocab = logits.shape[1]
        raw = logits if rows is None else logits.index_select(0, rows)
        raw = raw.clone() if rows is None and not read.kept else raw
        total = adjusting.log_sum_exp(raw) if read.normalised else raw.new_zeros(len(raw))
        most = max((vocab if top < 0 else min(top, vocab) for top in tops), default=0)
        values, ids = raw.topk(most, dim=-1) if most else (raw[:, :0], raw[:, :0].long())
        values = values - total[:, None]

        def described(tokens: torch.Tensor) -> list[torch.Tensor]:
            own = raw.gather(1, tokens[:, None]).squeeze(1) - total
            return [tokens, own, adjusting.rank(raw, tokens), values, ids]

        return described
