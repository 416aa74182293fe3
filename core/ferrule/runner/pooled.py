"""The vectors of rows whose prompt ends in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrule.interfaces.model import Model, PoolRow, Pools
from ferrule.runner.state import SlotState
from ferrule.runner.step import Rows
from ferrule.types import Chunk, Pooling


def pool(
    model: Model, hidden: torch.Tensor, rows: Rows, chunks: Sequence[Chunk], which: Sequence[int], state: SlotState
) -> torch.Tensor:
    """Return the vectors [which, size] float32 of the rows `which`, of a step's hidden states [tokens, hidden].

    Raises RuntimeError where the model, or a row's request, is not for vectors: the plan is broken.
    """
    if not isinstance(model, Pools):
        raise RuntimeError(f"a plan pools, and {type(model).__name__} does not")
    asked = []
    for row, first in zip(which, rows.borders[which].tolist(), strict=True):
        chunk = chunks[row]
        work = state.work_of(chunk.slot)
        if not isinstance(work, Pooling):
            raise RuntimeError(f"a plan pools slot {chunk.slot}, whose request is to be sampled")
        asked.append(PoolRow(first=first, count=chunk.count, work=work))
    return model.pool(hidden, asked)
