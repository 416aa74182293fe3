"""Pooling: hidden states become one vector for each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ferrule.interfaces.model import PoolingKind, PoolingSpec, PoolRow


class Pooler:
    """A pooler, which makes one vector of a prompt: the hidden state of its first or last token, or the mean of all.

    `usual` is how the architecture pools where neither checkpoint nor user says. A model that splits prompts can pool
    by the last token alone.
    """

    def __init__(self, spec: PoolingSpec, usual: PoolingKind) -> None:
        self.kind = spec.kind or usual
        self.normalize = spec.normalize

    def __call__(self, hidden: torch.Tensor, rows: Sequence[PoolRow]) -> torch.Tensor:
        """Map hidden [tokens, hidden] to [rows, hidden], float32."""
        if self.kind == "mean":
            parts = [hidden[row.first : row.first + row.count] for row in rows]
            vectors = torch.stack([part.float().mean(0) for part in parts])
        else:
            places = [row.first if self.kind == "cls" else row.first + row.count - 1 for row in rows]
            vectors = hidden[torch.tensor(places, device=hidden.device)].float()
        asked = [self.normalize if row.work.normalize is None else row.work.normalize for row in rows]
        wanted = torch.tensor(asked, device=hidden.device).unsqueeze(1)
        return torch.where(wanted, F.normalize(vectors), vectors)
