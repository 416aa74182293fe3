"""Operations on logits around sampling: masks of grammars, penalties, log-probabilities and ranks.

Nothing here waits for the device, and grid sizes depend only on shapes and on lengths that the host knows. All logits
are float32, contiguous [rows, vocab]; the torch references are in ``ferrule_plugins.sampler``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case

CHUNK = 4096  # logits of one program
IDS = 1024  # ids of a history that one program looks at
COLUMNS = 8  # of a table of penalties: row, slot, start, num_prompt, position, repetition, frequency, presence
COUNTED = 1 << 23  # counts held at once: 55 rows of 152,000 tokens
PROMPT = tl.constexpr(1 << 30)  # in a count: the id is in the prompt


def mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Ban, in place, each token of `rows` [n] int64 whose bit in `words` [n, vocab / 32] int32 is 0 or missing."""
    if len(rows):
        grid = (len(rows), triton.cdiv(logits.shape[1], CHUNK))
        _mask[grid](logits, rows, words, logits.shape[1], words.shape[1], CHUNK, num_warps=8)


def penalise(
    logits: torch.Tensor, history: torch.Tensor, table: torch.Tensor, longest: int, counts: torch.Tensor
) -> None:
    """Apply repetition, frequency and presence penalties, in place, in time linear in the ids that the rows have seen.

    `history` [slots, stride] holds ids; `table` [n, COLUMNS] float64 names for each penalised row the positions [start,
    position) of its slot that count, those from num_prompt on as output. `longest` is the most of position - start.
    `counts` [room, vocab] int32 is zero, and is so again afterwards; rows are worked on `room` at a time. Each touched
    logit is changed once, by the program that takes its count.
    """
    blocks, vocab, room = triton.cdiv(longest, IDS), logits.shape[1], counts.shape[0]
    if not blocks:
        return
    for first in range(0, len(table), room):
        some = table[first : first + room]
        grid = (len(some), blocks)
        _count[grid](history, history.stride(0), some, counts, vocab, IDS, num_warps=4)
        _penalise[grid](logits, history, history.stride(0), some, counts, vocab, IDS, num_warps=4)


def room(vocab: int) -> int:
    """Return how many rows at most `penalise` works on at once."""
    return max(1, COUNTED // vocab)


def count_buffer(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Make the zeros that `penalise` counts in, for `rows` rows or as many of them as there is room for."""
    return torch.zeros(min(rows, room(vocab)), vocab, dtype=torch.int32, device=device)


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Compute log(sum(exp)) of each row, [rows] float32: NaN for a row that holds NaN or no finite logit."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, CHUNK)
    most = torch.empty(rows, parts, device=logits.device)
    sums = torch.empty(rows, parts, device=logits.device)
    out = torch.empty(rows, device=logits.device)
    if rows:
        _sum_parts[(rows, parts)](logits, most, sums, vocab, CHUNK, num_warps=8)
        _sum[(rows,)](most, sums, out, parts, triton.next_power_of_2(parts), num_warps=1)
    return out


def rank(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rank of each row's token, int64 [rows] like `tokens`: one more than the number of larger logits."""
    ranks = torch.ones(len(logits), dtype=torch.long, device=logits.device)
    if len(logits):
        grid = (len(logits), triton.cdiv(logits.shape[1], CHUNK))
        _rank[grid](logits, tokens, ranks, logits.shape[1], CHUNK, num_warps=8)
    return ranks


# ------------------------------------------------------------------------------------------ masks


@triton.jit
def _mask(logits, rows, words, vocab, width, CHUNK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(words + i * width + at // 32, mask=at // 32 < width, other=0)
    banned = ((word >> (at % 32)) & 1) == 0
    tl.store(logits + row * vocab + at, tl.full([CHUNK], float("-inf"), tl.float32), mask=banned & (at < vocab))


# ------------------------------------------------------------------------------------------ penalties


@triton.jit
def _known(history, stride, entry, vocab, IDS: tl.constexpr):
    """Return the positions that this program looks at, the ids there, and which of those are valid."""
    slot = tl.load(entry + 1).to(tl.int64)
    start = tl.load(entry + 2).to(tl.int64)
    position = tl.load(entry + 4).to(tl.int64)
    at = start + tl.program_id(1) * IDS + tl.arange(0, IDS)
    ids = tl.load(history + slot * stride + at, mask=at < position, other=-1).to(tl.int64)
    return at, ids, (ids >= 0) & (ids < vocab)


@triton.jit
def _count(history, stride, table, counts, vocab, IDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    entry = table + i * 8
    at, ids, there = _known(history, stride, entry, vocab, IDS)
    is_output = at >= tl.load(entry + 3).to(tl.int64)
    here = counts + i * vocab + ids
    tl.atomic_add(here, 1, mask=there & is_output, sem="relaxed")
    tl.atomic_or(here, PROMPT, mask=there & (is_output == 0), sem="relaxed")


@triton.jit
def _penalise(logits, history, stride, table, counts, vocab, IDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    entry = table + i * 8
    row = tl.load(entry).to(tl.int64)
    repetition = tl.load(entry + 5).to(tl.float32)
    frequency = tl.load(entry + 6).to(tl.float32)
    presence = tl.load(entry + 7).to(tl.float32)
    _, ids, there = _known(history, stride, entry, vocab, IDS)
    took = tl.atomic_xchg(counts + i * vocab + ids, 0, mask=there, sem="relaxed")
    mine = there & (took != 0)
    times = tl.where(mine, took & (PROMPT - 1), 0).to(tl.float32)
    x = tl.load(logits + row * vocab + ids, mask=mine, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = x - frequency * times - tl.where(times > 0, presence, 0.0)
    tl.store(logits + row * vocab + ids, x, mask=mine)


# ------------------------------------------------------------------------------------------ log-probabilities


@triton.jit
def _sum_parts(logits, part_most, part_sum, vocab, CHUNK: tl.constexpr):
    """Compute a chunk's largest logit, and the sum of exp(x - largest), which is NaN if the chunk holds NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    most = tl.max(tl.where(x != x, float("-inf"), x), 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    place = row * tl.num_programs(1) + part
    tl.store(part_most + place, most)
    tl.store(part_sum + place, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _sum(part_most, part_sum, out, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    most = tl.load(part_most + row * parts + i, mask=i < parts, other=float("-inf"))
    sums = tl.load(part_sum + row * parts + i, mask=i < parts, other=0.0)
    top = tl.max(most, 0)
    base = tl.where(top == float("-inf"), float("nan"), top)
    tl.store(out + row, base + tl.log(tl.sum(sums * tl.exp(most - base), 0)))


@triton.jit
def _rank(logits, tokens, ranks, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(logits + row * vocab + tl.load(tokens + row))
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    larger = tl.sum((x > own).to(tl.int32), 0)
    tl.atomic_add(ranks + row, larger.to(tl.int64), sem="relaxed")


# ------------------------------------------------------------------------------------------ benchmarks


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases with a vocabulary of 152,064 tokens and histories of 2048."""
    vocab, length = (152_064, 2048) if device.type == "cuda" else (8192, 256)
    for rows in (1, 64, 256) if device.type == "cuda" else (2,):
        logits = torch.randn(rows, vocab, device=device) * 3
        history = torch.randint(0, vocab, (rows, length), dtype=torch.int32, device=device)
        numbers = [[row, row, 0, length // 2, length, 1.01, 0.01, 0.01] for row in range(rows)]
        table = torch.tensor(numbers, dtype=torch.float64, device=device)
        counts = count_buffer(rows, vocab, device)
        touched = history.nbytes * 2 + history.numel() * (4 * 4 + 2 * 4)  # ids twice, counts and logits there and back
        shape = f"{rows}x{vocab}"
        yield Case(f"penalties {shape}", partial(penalise, logits, history, table, length, counts), touched)
        yield Case(f"logprobs {shape}", partial(_tell, logits, history[:, 0].long()), 2 * logits.nbytes)
        words = torch.full((rows, vocab // 32), 0x55555555, dtype=torch.int32, device=device)
        every = torch.arange(rows, device=device)
        yield Case(f"mask {shape}", partial(mask, logits, every, words), logits.nbytes // 2 + words.nbytes)


def _tell(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    log_sum_exp(logits)
    rank(logits, tokens)
