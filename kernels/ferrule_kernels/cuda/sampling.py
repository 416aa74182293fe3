"""Greedy and random sampling from rows of logits, without sorting the vocabulary and without waiting for the device.

As in ``cpu/sampling.cpp``, tokens are drawn by inversion: weights exp((x - max) / temperature), of which those below a
floor become zero, are summed in vocabulary order, and the token is the one at which the sum passes a uniform number
times the total. top_k and top_p only determine the floor, the smallest weight that is kept. The weights of each eighth
of an octave are counted, or added up where there is a top_p alone, which tells the bin that the floor lies in; its
weights are gathered, and their bits are searched sixteen values at a time. With a top_k all weights from its bin on are
gathered, as its top_p depends on their sum.

Weights are summed as integers, in units of 2**-44 of the largest: sums are exact in any order. So a row's token does
not depend on how the row is cut, on the order of atomic additions or on its neighbours. The error of that is smaller
than that of float32: 2**-26 of the total for 262,144 tokens.

A row is cut into chunks of 4096 logits, each of them a program, so that one row keeps 37 processors busy as well as a
hundred rows do. In rows that are drawn, the weights overwrite the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case

CHUNK = 4096  # logits of one program
BINS = 1024  # eighths of octaves: a float in (0, 1] without its sign and its 20 lowest bits
KEPT = 32768  # weights of one row that are gathered; a row with more of them near its floor is searched as a whole
COLUMNS = 6  # of a table of draws: row, top_k (0: all), noise, top_p, temperature, min_p
ALL_BITS = tl.constexpr(0x3F800001)  # one more than the bits of 1.0
BIN_SHIFT = tl.constexpr(20)
MANY = tl.constexpr(1 << 62)  # more than any count or mass


@dataclass(frozen=True)
class Best:
    """The best tokens of rows. `tokens` has the first of the largest logits, or any id where the row is not finite."""

    tokens: torch.Tensor  # int64
    most: torch.Tensor  # float32, NaN for a row that holds one
    finite: torch.Tensor  # bool: no NaN, and a finite maximum


def best(logits: torch.Tensor) -> Best:
    """Find the best token of each row of logits [rows, vocab] float32, contiguous."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, CHUNK)
    device = logits.device
    part_most = torch.empty(rows, parts, device=device)
    part_token = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.long, device=device)
    most = torch.empty(rows, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    if rows:
        _best_parts[(rows, parts)](logits, part_most, part_token, vocab, CHUNK, num_warps=8)
        width = triton.next_power_of_2(parts)
        _best[(rows,)](part_most, part_token, tokens, most, finite, vocab, parts, width, num_warps=1)
    return Best(tokens, most, finite)


def draw(logits: torch.Tensor, most: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor, filtered: bool) -> None:
    """Write one token for each of the table's rows into `tokens` [rows] int64; overwrite their logits with weights.

    `most` [rows] float32 are the largest logits; the table [draws, COLUMNS] is float64 on the device, with noise in
    [0, 1) and no row twice. `filtered` is False where no draw has a top_k or a top_p. A row whose `most` is not finite
    gets token 0. Launches do not depend on what is on the device.
    """
    draws, vocab = table.shape[0], logits.shape[1]
    if not draws:
        return
    parts, device = triton.cdiv(vocab, CHUNK), logits.device
    unit = 2.0 ** min(44, 62 - (vocab - 1).bit_length())
    masses = torch.empty(draws, parts, dtype=torch.long, device=device)
    floors = torch.empty(draws, dtype=torch.int32, device=device)
    width, grid = triton.next_power_of_2(parts), (draws, parts)
    # Of each draw: what the bins hold, how many weights were gathered, and the mass of those above them.
    tally = torch.zeros(draws if filtered else 1, BINS + 2, dtype=torch.long, device=device)
    _weigh[grid](logits, most, table, masses, floors, tally, vocab, unit, CHUNK, BINS, num_warps=8)
    if filtered:
        kept = torch.empty(draws, min(KEPT, vocab), device=device)
        bounds = torch.empty(draws, 2, dtype=torch.int32, device=device)
        _bounds[(draws,)](table, masses, tally, bounds, vocab, parts, width, BINS, num_warps=4)
        _gather[grid](logits, table, tally, kept, bounds, vocab, unit, kept.shape[1], CHUNK, BINS, num_warps=8)
        _floor[(draws,)](
            logits,
            table,
            masses,
            tally,
            kept,
            bounds,
            floors,
            vocab,
            unit,
            kept.shape[1],
            parts,
            width,
            BINS,
            num_warps=8,
        )
        _remeasure[grid](logits, table, masses, floors, vocab, unit, CHUNK, num_warps=8)
    _invert[(draws,)](logits, table, masses, floors, tokens, vocab, unit, parts, width, CHUNK, num_warps=8)


# ------------------------------------------------------------------------------------------ the best


@triton.jit
def _best_parts(logits, part_most, part_token, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    odd = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    most = tl.max(x, 0)
    token = tl.min(tl.where(x == most, at, vocab - 1), 0)
    place = row * tl.num_programs(1) + part
    tl.store(part_most + place, tl.where(odd > 0, float("nan"), most))
    tl.store(part_token + place, token)


@triton.jit
def _best(part_most, part_token, tokens, most, finite, vocab, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    x = tl.load(part_most + row * parts + i, mask=i < parts, other=float("-inf"))
    token = tl.load(part_token + row * parts + i, mask=i < parts, other=0)
    odd = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    first = tl.min(tl.where((x == top) & (i < parts), token, vocab - 1), 0)
    tl.store(tokens + row, first.to(tl.int64))
    tl.store(most + row, tl.where(odd, float("nan"), top))
    tl.store(finite + row, (top > float("-inf")) & (top < float("inf")) & (odd == 0))


# ------------------------------------------------------------------------------------------ drawing


@triton.jit
def _mass(weights, unit):
    """Convert weights to integers, which add up exactly."""
    return (weights * unit).to(tl.int64)


@triton.jit
def _bits(weights):
    """Return the bits of weights as integers, which sort like the weights, as those are not negative."""
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _is_limited(entry, vocab):
    top_k = tl.load(entry + 1)
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def _is_filtered(entry, vocab):
    return _is_limited(entry, vocab) | (tl.load(entry + 3) < 1.0)


@triton.jit
def _needed(share, total):
    """Return the mass that the tokens kept by top_p must reach: at least one unit."""
    return tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _weigh(logits, most, table, masses, floors, tally, vocab, unit, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Replace logits by weights, zero below min_p, and compute chunks' masses and the bins of rows with filters."""
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    entry = table + i * 6
    row = tl.load(entry).to(tl.int64)
    top = tl.load(most + row)
    temperature = tl.load(entry + 4).to(tl.float32)
    least = tl.load(entry + 5).to(tl.float32)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    w = tl.exp(tl.div_rn(x - top, tl.zeros_like(x) + temperature))
    w = tl.where(w >= least, w, 0.0)  # NaN, of a row that is not finite, becomes zero too
    w = tl.where((x > float("-inf")) & (w <= 1.0), w, 0.0)
    tl.store(logits + row * vocab + at, w, mask=at < vocab)
    tl.store(masses + i * tl.num_programs(1) + part, tl.sum(_mass(w, unit), 0))
    if part == 0:
        tl.store(floors + i, 1)
    mine = tally + i * (BINS + 2)
    if _is_limited(entry, vocab):
        counts = tl.histogram(_bits(w) >> BIN_SHIFT, BINS)
        bins = tl.arange(0, BINS)
        tl.atomic_add(mine + bins, counts.to(tl.int64), mask=(counts > 0) & (bins > 0), sem="relaxed")
    elif _is_filtered(entry, vocab):
        mass = _mass(w, unit)
        tl.atomic_add(mine + (_bits(w) >> BIN_SHIFT), mass, mask=mass > 0, sem="relaxed")


@triton.jit
def _total(masses, i, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(masses + i * parts + part, mask=part < parts, other=0), 0)


@triton.jit
def _bounds(table, masses, tally, bounds, vocab, parts, PARTS: tl.constexpr, BINS: tl.constexpr):
    """Find the bits [low, high) between which the floor is, from how many weights each bin holds, or their mass.

    With a top_k, everything that it may keep is above `low`, and `high` is the end, because top_p must add it all up.
    """
    i = tl.program_id(0).to(tl.int64)
    entry = table + i * 6
    if _is_filtered(entry, vocab):
        limited = _is_limited(entry, vocab)
        needed = _needed(tl.load(entry + 3), _total(masses, i, parts, PARTS))
        if limited:
            needed = tl.load(entry + 1).to(tl.int64)
        bins = tl.arange(0, BINS)
        enough = tl.cumsum(tl.load(tally + i * (BINS + 2) + bins), 0, reverse=True) >= needed
        low = tl.maximum(tl.max(tl.where(enough, bins, 1), 0), 1)
        high = tl.where(limited, ALL_BITS, tl.minimum((low + 1) << BIN_SHIFT, ALL_BITS))
        tl.store(bounds + i * 2, low << BIN_SHIFT)
        tl.store(bounds + i * 2 + 1, high)


@triton.jit
def _gather(logits, table, tally, kept, bounds, vocab, unit, room, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Put the weights between which the floor is side by side, in any order; add up those above them."""
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    entry = table + i * 6
    if _is_filtered(entry, vocab):
        mine = tally + i * (BINS + 2)
        low = tl.load(bounds + i * 2)
        high = tl.load(bounds + i * 2 + 1)
        row = tl.load(entry).to(tl.int64)
        at = part * CHUNK + tl.arange(0, CHUNK)
        w = tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0)
        bits = _bits(w)
        inside = (bits >= low) & (bits < high)
        found = inside.to(tl.int32)
        count = tl.sum(found, 0)
        above = tl.sum(tl.where(bits >= high, _mass(w, unit), 0), 0)
        first = tl.atomic_add(mine + BINS, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(mine + BINS + 1, above, sem="relaxed")
        place = first + tl.cumsum(found, 0) - 1
        tl.store(kept + i * room + place, w, mask=inside & (place < room))


@triton.jit
def _narrow(weights, length, low, high, above, count, mass, unit, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Find the bits in [low, high) of the largest weight such that `count` weights reach it, or their mass is `mass`.

    `above` is the mass of weights that are not in the list. Returns `low` where no weight satisfies either.
    """
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        pivots = low + step * tl.arange(0, WAYS)
        many = tl.zeros([WAYS, BLOCK], tl.int32)  # added up across threads once, not for each block
        masses = tl.zeros([WAYS, BLOCK], tl.int64)
        start = length * 0
        while start < length:
            at = start + tl.arange(0, BLOCK)
            w = tl.load(weights + at, mask=at < length, other=0.0)
            reaching = _bits(w)[None, :] >= pivots[:, None]
            many += reaching.to(tl.int32)
            masses += tl.where(reaching, _mass(w, unit)[None, :], 0)
            start += BLOCK
        counts, sums = tl.sum(many, 1).to(tl.int64), tl.sum(masses, 1) + above
        enough = ((counts >= count) | (sums >= mass)) & (pivots < high)
        steps = tl.maximum(tl.sum(enough.to(tl.int32), 0), 1)
        high = tl.minimum(high, low + steps * step)
        low = low + (steps - 1) * step
    return low


@triton.jit
def _weight_from(weights, length, low, unit, BLOCK: tl.constexpr):
    """Return the mass of weights whose bits are at least `low`."""
    total = tl.zeros([BLOCK], tl.int64)
    start = length * 0
    while start < length:
        at = start + tl.arange(0, BLOCK)
        w = tl.load(weights + at, mask=at < length, other=0.0)
        total += tl.where(_bits(w) >= low, _mass(w, unit), 0)
        start += BLOCK
    return tl.sum(total, 0)


@triton.jit
def _last_kept(weights, length, low, high, above, total, entry, vocab, unit):
    """Return the bits of the smallest weight that passes top_k and then top_p."""
    top_k = tl.load(entry + 1)
    share = tl.load(entry + 3)
    none = above * 0
    if _is_limited(entry, vocab):
        low = _narrow(weights, length, low, high, none, top_k.to(tl.int64), none + MANY, unit, 512, 16)
        total = _weight_from(weights, length, low, unit, 1024)
    if share < 1.0:
        low = _narrow(weights, length, low, high, above, none + MANY, _needed(share, total), unit, 512, 16)
    return low


@triton.jit
def _floor(
    logits,
    table,
    masses,
    tally,
    kept,
    bounds,
    floors,
    vocab,
    unit,
    room,
    parts,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Find the bits of the smallest weight that each row with filters keeps."""
    i = tl.program_id(0).to(tl.int64)
    entry = table + i * 6
    if _is_filtered(entry, vocab):
        low = tl.load(bounds + i * 2)
        high = tl.load(bounds + i * 2 + 1)
        total = _total(masses, i, parts, PARTS)
        found = tl.load(tally + i * (BINS + 2) + BINS)
        above = tl.load(tally + i * (BINS + 2) + BINS + 1)
        if found <= room:
            floor = _last_kept(kept + i * room, found.to(tl.int32), low, high, above, total, entry, vocab, unit)
            tl.store(floors + i, floor)
        else:
            row = tl.load(entry).to(tl.int64)
            length = (tl.zeros_like(found) + vocab).to(tl.int32)
            floor = _last_kept(logits + row * vocab, length, low, high, above * 0, total, entry, vocab, unit)
            tl.store(floors + i, floor)


@triton.jit
def _remeasure(logits, table, masses, floors, vocab, unit, CHUNK: tl.constexpr):
    """Compute each chunk's mass again, of weights that reach the floor."""
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    entry = table + i * 6
    if _is_filtered(entry, vocab):
        row = tl.load(entry).to(tl.int64)
        at = part * CHUNK + tl.arange(0, CHUNK)
        w = tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0)
        mass = tl.sum(tl.where(_bits(w) >= tl.load(floors + i), _mass(w, unit), 0), 0)
        tl.store(masses + i * tl.num_programs(1) + part, mass)


@triton.jit
def _invert(logits, table, masses, floors, tokens, vocab, unit, parts, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Find the first token at which the running mass passes noise * total: the chunk first, then within it."""
    i = tl.program_id(0).to(tl.int64)
    entry = table + i * 6
    row = tl.load(entry).to(tl.int64)
    part = tl.arange(0, PARTS)
    mass = tl.load(masses + i * parts + part, mask=part < parts, other=0)
    total = tl.sum(mass, 0)
    target = tl.minimum((tl.load(entry + 2) * total.to(tl.float64)).to(tl.int64), total - 1)
    passed = (tl.cumsum(mass, 0) <= target) & (part < parts)
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), parts - 1)
    before = tl.sum(tl.where(part < chunk, mass, 0), 0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0)
    sums = before + tl.cumsum(tl.where(_bits(w) >= tl.load(floors + i), _mass(w, unit), 0), 0)
    inside = tl.sum((sums <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.where(total > 0, chunk * CHUNK + inside, 0).to(tl.int64))


# ------------------------------------------------------------------------------------------ benchmarks


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases with a vocabulary of 152,064 tokens. Logits are copied before a draw, which overwrites them."""
    vocab = 152_064 if device.type == "cuda" else 8192
    for rows in (1, 64, 256) if device.type == "cuda" else (2,):
        logits = torch.randn(rows, vocab, device=device) * 3
        yield Case(f"greedy {rows}x{vocab}", partial(best, logits), logits.nbytes)
        for name, (top_k, top_p) in {"temperature": (0, 1.0), "top_p": (0, 0.95), "top_k + top_p": (20, 0.95)}.items():
            numbers = [[row, top_k, (row + 0.5) / rows, top_p, 0.7, 0.0] for row in range(rows)]
            table = torch.tensor(numbers, dtype=torch.float64, device=device)
            yield Case(f"copy + {name} {rows}x{vocab}", partial(_copy_and_draw, logits, table), 3 * logits.nbytes)


def _copy_and_draw(logits: torch.Tensor, table: torch.Tensor) -> None:
    mine = logits.clone()
    found = best(mine)
    draw(mine, found.most, table, found.tokens, True)
