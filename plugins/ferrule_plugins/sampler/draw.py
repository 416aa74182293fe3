"""Drawing tokens by inversion: filter the probabilities, sum them up, look the uniform number up in the sums.

Every step works on each row alone, and in an order that the row alone decides (sums are running sums in vocabulary
order, ties are kept or dropped together), so that a row's token is the same in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferrule.types import TokenSampling

CANDIDATES = 1024  # enough for nearly every top_p; rows that need more look at eight times as many, and so on
ELEMENTS = 1 << 22  # logits that are worked on at once


def draw(logits: torch.Tensor, samplings: Sequence[TokenSampling], noise: torch.Tensor) -> torch.Tensor:
    """Draw tokens [rows] int64 for logits [rows, vocab] float32 and noise [rows] float64 in [0, 1).

    Applies temperature, min_p, top_k and top_p, in this order. Each row has a finite maximum.
    """
    size = max(1, ELEMENTS // logits.shape[1])
    chunks = [
        _draw(logits[start : start + size], samplings[start : start + size], noise[start : start + size])
        for start in range(0, logits.shape[0], size)
    ]
    return torch.cat(chunks)


def processed(logits: torch.Tensor, shapes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [rows, vocab] that tokens [rows] were drawn from: minus infinity where a token is left out.

    A row of `shapes` [rows, 4] float64: top_k (0: all), top_p, temperature, min_p. Nothing waits for the device. A
    token that was drawn is never left out, even where a kernel rounds otherwise at the border.
    """
    size = max(1, ELEMENTS // logits.shape[1])
    parts = zip(*(torch.split(tensor, size) for tensor in (logits, shapes, tokens.unsqueeze(1))), strict=True)
    return torch.cat([_processed(*part) for part in parts])


def _processed(logits: torch.Tensor, shapes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `processed` of one part, for tokens [rows, 1]."""
    vocab = logits.shape[1]
    top_k, top_p, temperature, min_p = (column.unsqueeze(1) for column in shapes.unbind(1))
    logits = logits / temperature.float()
    probs = logits.softmax(-1)
    best = probs.sort(-1, descending=True).values
    floor = best[:, :1] * min_p.float()
    last = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long() - 1
    floor = torch.maximum(floor, best.gather(1, last).where(top_k > 0, 0.0))
    best = best.where(best >= floor, 0.0)
    sums = best.cumsum(-1, dtype=torch.float64)
    kept = (sums - best < top_p * sums[:, -1:]) & (best > 0)
    nucleus = best.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))
    floor = torch.maximum(floor, nucleus.where(top_p < 1, 0.0))
    return logits.masked_fill(probs < floor, float("-inf")).scatter(1, tokens, logits.gather(1, tokens))


def _draw(logits: torch.Tensor, samplings: Sequence[TokenSampling], noise: torch.Tensor) -> torch.Tensor:
    temperature = _column([s.temperature for s in samplings], logits)
    probs = torch.softmax(logits / temperature, dim=-1)
    filtered = [row for row, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1 or s.min_p > 0]
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        probs[rows] = _filter(probs[rows], [samplings[row] for row in filtered])
    sums = probs.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # Strictly below the total, so that the token that is found has a probability.
    target = torch.minimum(noise.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).squeeze(1)


def _filter(probs: torch.Tensor, samplings: Sequence[TokenSampling]) -> torch.Tensor:
    """Set what min_p, top_k and top_p exclude to zero. Tokens as likely as the last one kept are kept too."""
    vocab = probs.shape[1]
    floor = probs.amax(-1, keepdim=True) * _column([s.min_p for s in samplings], probs)
    ranks = [min(s.top_k, vocab) if s.top_k > 0 else vocab for s in samplings]
    nucleus = any(s.top_p < 1 for s in samplings)
    most = max((rank for rank in ranks if rank < vocab), default=0)
    if nucleus:
        most = min(vocab, max(most, CANDIDATES))
    best = probs.topk(most, dim=-1).values if most else probs[:, :0]  # descending
    if any(rank < vocab for rank in ranks):
        last = torch.tensor([[min(rank, most) - 1] for rank in ranks], device=probs.device)
        limited = torch.tensor([[rank < vocab] for rank in ranks], device=probs.device)
        floor = torch.where(limited, torch.maximum(floor, best.gather(1, last)), floor)
    probs = probs.where(probs >= floor, 0.0)
    if nucleus:
        probs = _nucleus(probs, best.where(best >= floor, 0.0), [s.top_p for s in samplings])
    return probs


def _nucleus(probs: torch.Tensor, best: torch.Tensor, tops: Sequence[float]) -> torch.Tensor:
    """Keep the likeliest tokens until their sum reaches `tops` of the whole. `best`: the first of them, descending."""
    share = torch.tensor(tops, dtype=torch.float64, device=probs.device).unsqueeze(1)
    total = probs.cumsum(-1, dtype=torch.float64)[:, -1:]
    reached = best.cumsum(-1, dtype=torch.float64)
    short = ((reached[:, -1:] < share * total) & (share < 1)).squeeze(1)
    kept = (reached - best < share * total) & (best > 0)
    floor = best.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0)).where(share < 1, 0.0)
    out = probs.where(probs >= floor, 0.0)
    if best.shape[1] < probs.shape[1] and bool(short.any()):
        rest = probs[short]
        more = rest.topk(min(rest.shape[1], 8 * best.shape[1]), dim=-1).values
        out[short] = _nucleus(rest, more, [tops[row] for row in short.nonzero().flatten().tolist()])
    return out


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
