"""Log-probabilities for the client: of the raw logits, before penalties, masks and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrule.types import TokenLogprobs

# float32 logits held at once while a prompt's logprobs are computed.
CHUNK_ELEMENTS = 1 << 23


def describe(logprobs: torch.Tensor, chosen: torch.Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of logprobs [rows, vocab] float32.

    `chosen` [rows] int64 are the tokens in question; `tops[r]` is how many of the most likely ones row r lists, and a
    negative number is all of them. Rank 1 is the most likely token; equal ones share a rank.
    """
    vocab = logprobs.shape[1]
    wanted = [vocab if top < 0 else min(top, vocab) for top in tops]
    own = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    most = max(wanted, default=0)
    values, ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    value_rows, id_rows = values.tolist(), ids.tolist()
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(id_row[:count], value_row[:count], strict=True)))
        for token, logprob, rank, id_row, value_row, count in zip(
            chosen.tolist(), own.squeeze(1).tolist(), ranks, id_rows, value_rows, wanted, strict=True
        )
    ]
