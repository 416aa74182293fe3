"""Repetition, presence and frequency penalties in torch, which is the definition."""

from __future__ import annotations

import numpy as np
import torch

from ferrule_plugins.sampler.plan import Numbers


class Penalties:
    """The penalties of all rows that have them, applied in time linear in their ids.

    Keeps a buffer of counts, all zero between calls.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(0, dtype=torch.int32)

    def apply(self, logits: torch.Tensor, history: torch.Tensor, table: Numbers) -> None:
        """Change `logits` [all rows, vocab] in place at the ids that the table's rows have seen.

        The table is that of `plan.Penalised`. Repetition looks at the prompt's ids and the output, the other two at the
        output. Each touched logit is computed from its first value, so that an id that occurs often is written often,
        with the same number.
        """
        rows, slots, starts, prompts, ends = table[:, :5].astype(np.int64).T
        vocab, device = logits.shape[1], logits.device
        lengths = ends - starts
        owner = np.repeat(np.arange(len(table)), lengths)  # index into the table of each id
        position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths - starts, lengths)
        flat = torch.from_numpy(slots[owner] * history.stride(0) + position).to(device)
        ids = history.view(-1).index_select(0, flat).long()
        whose = torch.from_numpy(owner).to(device)
        is_output = torch.from_numpy(position >= prompts[owner]).to(device)
        keys = torch.from_numpy(rows[owner] * vocab).to(device) + ids
        counts = self._count(whose * vocab + ids, is_output, len(table) * vocab)
        factors = torch.from_numpy(table[:, 5:].astype(np.float32)).to(device)
        repetition, frequency, presence = factors[whose].unbind(1)
        view = logits.view(-1)
        values = view[keys]
        values = torch.where(values > 0, values / repetition, values * repetition)
        view[keys] = values - frequency * counts - presence * (counts > 0)

    def _count(self, keys: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """Count how often each key occurs among the counted ones, [keys] int32."""
        if self._counts.numel() < size:
            self._counts = torch.zeros(size, dtype=torch.int32, device=keys.device)
        self._counts.index_add_(0, keys, counted.to(torch.int32))
        found = self._counts[keys]
        self._counts[keys] = 0
        return found
