"""Log-probabilities, or logits, for the client: the numbers of some tokens, and their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ferrule.interfaces.sampler import LogprobsMode
from ferrule.types import TokenLogprobs

# float32 logits held at once while a prompt's logprobs are computed.
CHUNK_ELEMENTS = 1 << 23


def rank(logprobs: torch.Tensor, chosen: torch.Tensor, tops: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors that `describe` reads, from logprobs or logits [rows, vocab] float32, on their device.

    Does not wait for the device. `chosen` [rows] int64 are the tokens in question; `tops[r]` is how many of the most
    likely ones row r lists, and a negative number is all of them. Returns chosen [rows], their logprobs and ranks
    [rows], and the most likely ones' logprobs and ids [rows, most]. Rank 1 is the most likely token; equal ones share a
    rank.
    """
    vocab = logprobs.shape[1]
    most = max((vocab if top < 0 else min(top, vocab) for top in tops), default=0)
    own = logprobs.gather(1, chosen.unsqueeze(1))
    values, ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    return [chosen, own.squeeze(1), (logprobs > own).sum(-1) + 1, values, ids]


def rank_prompt(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    top: int,
    mode: LogprobsMode,
    width: int,
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Rank tokens `chosen` [n], which follow the hidden states [n, hidden] of a prompt, in parts.

    A part is so small that its logits, of `width` each, stay within a bound of memory. Yields whether its logits are
    all finite, [] bool, and the result of `rank` for these, or for their logprobs.
    """
    size = max(1, CHUNK_ELEMENTS // width)
    for piece, tokens in zip(torch.split(hidden, size), torch.split(chosen, size), strict=True):
        values = logits_of(piece)
        values = values.log_softmax(-1) if mode.normalised else values
        yield torch.isfinite(values.amax(-1)).all(), rank(values, tokens, [top] * len(tokens))


def describe(ranked: Sequence[torch.Tensor], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return one entry per row of the result of `rank`, once it is on the host."""
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, rank, values, ids, count in zip(
            *(tensor.tolist() for tensor in ranked), [None if top < 0 else top for top in tops], strict=True
        )
    ]
