"""Paged attention for batches that mix prefill, decode and speculation: a row may have any number of queries.

There is one kernel. A program computes the queries of some tokens of a row for all heads of a group, so that a key
head is read once for all of them. It goes over the row's keys in tiles with an online softmax (Milakov and Gimelshein
2018, as in FlashAttention, Dao 2023), in float32 and to the base 2. It is launched twice where a batch needs both:

- *long* rows, of more than `SHORT` queries: a program has many queries, and all their keys;
- *short* rows: a program has few queries, and some *splits* of their context (Flash-Decoding, Dao et al. 2023). Another
  kernel combines the splits.

**A row's result has the same bits in any batch.** Whether a row is long or short, how its queries are cut and where
its splits lie depends on the row's own lengths and on the model's shapes alone: a split has `SPLIT` tokens, or a
`MOST_SPLITS`th of the context where that is more. What the batch decides is how many programs share the splits, and
whether the one split of a short context needs to be combined, neither of which changes any sum.

Nothing here waits for the device: grid sizes follow from shapes and from maxima that the host knows, and programs
without work return at once. A row without context reads nothing and gets zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton

from ferrule_kernels.attention import ScoreOptions
from ferrule_kernels.cuda.attention_kernels import LOG2E, attend_kernel, combine_kernel
from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.tiles import power_of_2

SHORT = 16  # queries of a short row, at most
SPLIT = 512  # tokens, a multiple of every tile's keys
MOST_SPLITS = 32  # of a row, a power of two
_PROGRAMS = 8192  # of a launch over splits: enough for every device to balance, few enough to start at once


@dataclass(frozen=True)
class Batch:
    """The rows of a step. The tensors are int32 on the device; the numbers are the host's.

    Row r owns query tokens [query_start[r], query_start[r + 1]), the last ones of its context_lens[r] tokens.
    """

    query_start: torch.Tensor  # [rows + 1]
    context_lens: torch.Tensor  # [rows]
    block_table: torch.Tensor  # [rows, blocks], neighbouring entries side by side
    block_size: int
    max_context_len: int
    short_queries: int  # of the longest short row; 0: there is none
    has_long: bool

    @staticmethod
    def kinds(query_lens: Sequence[int], max_query_len: int) -> tuple[int, bool]:
        """Return `short_queries` and `has_long` for rows of such lengths, the greatest of which is `max_query_len`."""
        if max_query_len <= SHORT:
            return max_query_len, False
        return max((count for count in query_lens if count <= SHORT), default=0), True


@dataclass(frozen=True)
class Tiles:
    """The tiles of a launch: `queries` tokens of a row, with all heads of a group in `rows` lines, by `keys` keys."""

    queries: int
    rows: int  # a power of two, at least 16
    keys: int
    warps: int
    stages: int


def cache_shape(num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Return the shape of a KV cache: keys at [:, 0] and values at [:, 1].

    The entries of a head in a block are contiguous, which makes for the longest reads in one piece.
    """
    return (num_blocks, 2, kv_heads, block_size, dim)


def tiles(group: int, dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, short: bool, shared: int) -> Tiles:
    """Choose tiles for short or long rows, with `group` query heads for each key head.

    `shared` is the number of bytes of shared memory that a program may have. A line of keys of up to 256 bytes, as 128
    bfloat16 are, allows tiles of 64 keys; twice that, 32; beyond, 16. Long rows fill 128, 64 or 32 lines by the same
    rule, and have 8 warps for 128. Float32, which is multiplied without tensor cores, counts twice. While a tile is
    computed, the next two are being loaded where there is memory for them, else one; Triton wants two stages for each,
    since keys can be requested only when the block table has arrived.
    """
    width = power_of_2(max(dim, 16)) * dtype.itemsize
    wide = 2 * width if dtype == torch.float32 else width
    step = 0 if wide <= 256 else 1 if wide <= 512 else 2
    keys, lines = 64 >> step, max(16, power_of_2(group))
    if not short:
        lines = max(lines, 128 >> step)
    tile = 2 * keys * width * cache_dtype.itemsize // dtype.itemsize
    ahead = max(0, min(2, (shared - lines * width - 8192) // tile))
    return Tiles(queries=lines // group, rows=lines, keys=keys, warps=8 if lines >= 128 else 4, stages=2 * ahead + 1)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: Batch,
    options: ScoreOptions,
    window: int = 0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Attend with q [tokens, heads, dim] over `cache`, whose shape is `cache_shape`'s and which has the new keys.

    Of q's type or in 8 bits, in which case `scales` are what its keys and values are multiplied by. Only the strides of
    the cache's first two dimensions are free. `window` counts the tokens seen, the query's own included; 0 is all.
    Returns [tokens, heads, dim].
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.has_long:
        _attend(q, cache, out, batch, options, window, scales, 0)
    if batch.short_queries:
        _attend(q, cache, out, batch, options, window, scales, batch.short_queries)
    return out


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    batch: Batch,
    options: ScoreOptions,
    window: int,
    scales: tuple[float, float],
    room: int,
) -> None:
    """Launch the kernel once: for the long rows where `room` is 0, else for short rows with at most `room` queries."""
    (tokens, heads, dim), kv_heads, rows = q.shape, cache.shape[2], batch.context_lens.shape[0]
    cut = tiles(heads // kv_heads, dim, q.dtype, cache.dtype, bool(room), shared_memory(q.device))
    seen = min(batch.max_context_len, window + cut.queries) if window else batch.max_context_len
    splits = min(MOST_SPLITS, triton.cdiv(max(seen, 1), SPLIT)) if room else 1
    programs = rows * triton.cdiv(room, cut.queries) if room else tokens // cut.queries + rows
    parts = stats = None
    if splits > 1:
        parts = torch.empty((rows * room, heads, splits, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((rows * room, heads, splits, 2), dtype=torch.float32, device=q.device)
    scale, cap = options.scale * scales[0], options.soft_cap
    shared = {
        "HEADS": heads, "DIM": dim, "D": power_of_2(max(dim, 16)), "QUERIES": cut.queries, "KEYS": cut.keys,
        "SHORT": SHORT, "SPLIT": SPLIT, "MOST_SPLITS": MOST_SPLITS, "WINDOWED": bool(window),
    }  # fmt: skip
    attend_kernel[(programs, kv_heads, min(splits, triton.cdiv(_PROGRAMS, programs * kv_heads)))](
        q, cache, out, parts, stats, batch.block_table, batch.query_start, batch.context_lens,
        slopes_of(options.alibi_slopes, q.device) if options.alibi_slopes else None,
        options.sinks, rows, splits, room, window,
        (2 * scale / cap if cap else scale) * LOG2E.value,
        cap * LOG2E.value, scales[1],
        q.stride(0), q.stride(1), cache.stride(0), cache.stride(1), batch.block_table.stride(0),
        GROUP=heads // kv_heads, BLOCK_SIZE=batch.block_size, ROWS=cut.rows, SPLITTING=bool(room), SOFT_CAP=bool(cap),
        ALIBI=bool(options.alibi_slopes), SINKS=options.sinks is not None,
        num_warps=cut.warps, num_stages=cut.stages, **shared,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows * room, heads)](
            parts,
            stats,
            out,
            batch.query_start,
            batch.context_lens,
            splits,
            room,
            window,
            scales[1],
            num_warps=4,
            **shared,
        )


@lru_cache(maxsize=64)
def slopes_of(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the slopes [heads] as float32 on the device; kept, since a copy from the host cannot be recorded."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":
        return 99 * 1024
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    return int(properties.shared_memory_per_block_optin)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of decode of many rows, prefill, and one long row, with the heads of 8B and 0.6B models.

    They are small for the interpreter. Bytes are those of keys and values; in prefill, flops are those of the half of
    the scores that causality leaves.
    """
    shapes: dict[str, list[tuple[int, int]]] = {
        "decode 64 x 4k": [(1, 4096)] * 64,
        "decode 1 x 32k": [(1, 32768)],
        "prefill 8k": [(8192, 8192)],
        "64 decode beside a prefill of 2k": [(1, 2048)] * 64 + [(2048, 2048)],
    }
    models = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
    if device.type != "cuda":
        shapes, models = {"decode": [(1, 40)] * 2, "prefill": [(20, 20)]}, {"small": (4, 2, 16)}
    for (name, rows), (model, (heads, kv_heads, dim)) in itertools.product(shapes.items(), models.items()):
        for kind in (torch.bfloat16, torch.float8_e4m3fn) if device.type == "cuda" else (torch.float32,):
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            q, cache, batch = _case(rows, (heads, kv_heads, dim), dtype, kind, device)
            run = partial(attend, q, cache, batch, _Plain(dim**-0.5))
            moved = sum(length for _, length in rows) * kv_heads * dim * 2 * kind.itemsize + 2 * q.nbytes
            seen = sum(count * (2 * length - count + 1) // 2 for count, length in rows)
            yield Case(f"{name}, {model}{' in 8 bits' if kind != dtype else ''}", run, moved, 4 * seen * heads * dim)


@dataclass(frozen=True)
class _Plain:
    """Score options without anything special."""

    scale: float
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    sinks: torch.Tensor | None = None


def _case(
    rows: Sequence[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kind: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Make queries, a cache whose blocks lie in a shuffled order, and the batch, for rows of (queries, context)."""
    heads, kv_heads, dim = shape
    counts, lengths = [count for count, _ in rows], [length for _, length in rows]
    blocks = triton.cdiv(max(lengths), 16)
    table = torch.randperm(blocks * len(rows), dtype=torch.int32).view(len(rows), blocks) + 1
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    cache = torch.randn(cache_shape(blocks * len(rows) + 1, 16, kv_heads, dim), dtype=dtype, device=device).to(kind)
    short, has_long = Batch.kinds(counts, max(counts))
    batch = Batch(
        query_start=starts.to(device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        block_size=16,
        max_context_len=max(lengths),
        short_queries=short,
        has_long=has_long,
    )
    return torch.randn(sum(counts), heads, dim, dtype=dtype, device=device), cache, batch
