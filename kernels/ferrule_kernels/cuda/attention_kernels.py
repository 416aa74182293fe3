"""The Triton kernels that `attention` launches."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_VARYING = ("rows", "splits", "window", "room", "table_stride")  # from step to step: no reason to compile anew
_TABLES = ("table", "query_start", "context_lens")
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _key_range(past, tile, query_len, window, QUERIES: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the positions [begin, end) that the queries of a tile see together."""
    first = past + tile * QUERIES
    end = past + tl.minimum((tile + 1) * QUERIES, query_len)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0)
    return begin, end


@triton.jit
def _split_size(count, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Return how many tokens each split of `count` tokens has, which depends on `count` alone."""
    return tl.maximum(SPLIT, tl.cdiv(tl.cdiv(count, MOST_SPLITS), KEYS) * KEYS)


@triton.jit
def _row_of(tile, query_start, rows, QUERIES: tl.constexpr):
    """Return the row of a tile of a flat batch, where the tiles of row r begin at query_start[r] // QUERIES + r."""
    low = tile * 0
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start + middle) // QUERIES + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _score(q, k, position, key, slope, scale, cap_scale, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr):
    """Compute scores [rows, keys] float32, times log2(e)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFT_CAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor divides 0 by 0
        scores = cap_scale * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if ALIBI:
        scores -= slope[:, None] * (position[:, None] - key[None, :]).to(tl.float32)
    return scores


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """Convert entries of the cache to the type of the computation; 8 bits by way of float16, as devices do."""
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(tl.float16)
    return x.to(dtype)


@triton.jit
def _over_keys(
    q,  # [rows, D]
    best,  # [rows] float32, the highest score so far
    total,  # [rows] float32, the sum of the weights
    acc,  # [rows, D] float32, the weighted sum of the values
    keys_at,  # of this head, in block 0
    values_at,
    table,  # of this row
    position,  # [rows] of the queries
    slope,  # [rows]
    begin,
    end,
    block_stride,
    scale,
    cap_scale,
    window,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Go over the keys [begin, end). Without MASKED, all queries see all of them, and they are whole tiles."""
    column = tl.arange(0, D)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        if MASKED:
            inside = key < end
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        at = (block * block_stride + (key % BLOCK_SIZE) * DIM)[:, None] + column[None, :]
        if MASKED:
            there = inside[:, None] & (column < DIM)[None, :]
            k = tl.load(keys_at + at, mask=there, other=0.0)
            v = tl.load(values_at + at, mask=there, other=0.0)
        elif D != DIM:
            k = tl.load(keys_at + at, mask=(column < DIM)[None, :], other=0.0)
            v = tl.load(values_at + at, mask=(column < DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys_at + at)
            v = tl.load(values_at + at)
        scores = _score(q, _widened(k, q.dtype), position, key, slope, scale, cap_scale, SOFT_CAP, ALIBI)
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        base = better
        if MASKED:  # a query that has seen nothing yet has no best score
            base = tl.where(better == float("-inf"), 0.0, better)
        fade = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), _widened(v, q.dtype), acc * fade[:, None], input_precision="ieee")
        best = better
    return best, total, acc


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_TABLES)
def attend_kernel(
    q_at,
    cache,
    out,
    parts,  # float32 [rows * room, heads, splits, DIM]; None where splits are not kept apart
    stats,  # float32 [rows * room, heads, splits, 2], the highest score and the sum of the weights
    table,
    query_start,
    context_lens,
    slopes,
    sinks,
    rows,
    splits,
    room,
    window,
    scale,
    cap_scale,
    value_scale,
    q_token,  # strides
    q_head,
    block_stride,
    value_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,  # DIM, or the power of two above it
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITTING: tl.constexpr,  # this launch is for short rows, of up to `room` queries
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
):
    kv_head = tl.program_id(1)
    if SPLITTING:
        row_tiles = tl.cdiv(room, QUERIES)
        row = tl.program_id(0) // row_tiles
        tile = tl.program_id(0) % row_tiles
    else:  # the last tiles of a row have the most keys: they are the first to be started
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        row = _row_of(number, query_start, rows, QUERIES)
        tile = number - tl.load(query_start + row) // QUERIES - row
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start
    context = tl.load(context_lens + row)
    if tile * QUERIES >= query_len:
        return
    if (query_len <= SHORT) != SPLITTING:
        return
    past = context - query_len
    begin, end = _key_range(past, tile, query_len, window, QUERIES, WINDOWED)
    count = tl.maximum(end - begin, 0)  # 0 without context
    size = tl.maximum(count, 1)
    used = 1
    if SPLITTING:
        size = _split_size(count, SPLIT, MOST_SPLITS, KEYS)
        if parts is not None:
            used = tl.cdiv(count, size)

    line = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    query = tile * QUERIES + line // GROUP
    head = kv_head * GROUP + line % GROUP
    real = (line < QUERIES * GROUP) & (query < query_len)
    position = past + query
    token = (start + query).to(tl.int64)
    whole = real[:, None] & (column < DIM)[None, :]
    q = tl.load(q_at + (token * q_token + head * q_head)[:, None] + column[None, :], mask=whole, other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0) * LOG2E
    table_row = table + row.to(tl.int64) * table_stride
    keys_at = cache + kv_head * BLOCK_SIZE * DIM
    values_at = keys_at + value_stride

    for split in range(tl.program_id(2), used, tl.num_programs(2)):
        low = begin + split * size
        high = tl.minimum(low + size, begin + count)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if SINKS:  # a key without a value, which is seen before all others
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
            first = (split == 0) & (count > 0)
            best = tl.where(first, sink, best)
            total = tl.where(first, 1.0, total)
        acc = tl.zeros([ROWS, D], tl.float32)
        middle = low
        if not WINDOWED:  # keys at or before the first query are seen by all
            middle = low + tl.maximum(tl.minimum(high, past + tile * QUERIES + 1) - low, 0) // KEYS * KEYS
            best, total, acc = _over_keys(
                q, best, total, acc, keys_at, values_at, table_row, position, slope, low, middle, block_stride, scale,
                cap_scale, window, DIM, D, BLOCK_SIZE, KEYS, False, WINDOWED, SOFT_CAP, ALIBI,
            )  # fmt: skip
        best, total, acc = _over_keys(
            q, best, total, acc, keys_at, values_at, table_row, position, slope, middle, high, block_stride, scale,
            cap_scale, window, DIM, D, BLOCK_SIZE, KEYS, True, WINDOWED, SOFT_CAP, ALIBI,
        )  # fmt: skip
        if parts is not None:
            place = ((row * room + query).to(tl.int64) * HEADS + head) * splits + split
            tl.store(parts + (place * DIM)[:, None] + column[None, :], acc, mask=whole)
            tl.store(stats + 2 * place, best, mask=real)
            tl.store(stats + 2 * place + 1, total, mask=real)
        else:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
            to = (token * HEADS + head) * DIM
            tl.store(out + to[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_TABLES)
def combine_kernel(
    parts,
    stats,
    out,
    query_start,
    context_lens,
    splits,
    room,
    window,
    value_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Combine the splits of one query of one head.

    All `MOST_SPLITS` are summed, absent ones as zeros, so that the order of the sum is always the same.
    """
    row = tl.program_id(0) // room
    query = tl.program_id(0) % room
    head = tl.program_id(1)
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start
    context = tl.load(context_lens + row)
    if (query >= query_len) | (query_len > SHORT):
        return
    begin, end = _key_range(context - query_len, query // QUERIES, query_len, window, QUERIES, WINDOWED)
    count = tl.maximum(end - begin, 0)  # 0 without context
    split = tl.arange(0, MOST_SPLITS)
    there = split < tl.cdiv(count, _split_size(count, SPLIT, MOST_SPLITS, KEYS))
    column = tl.arange(0, D)
    place = (tl.program_id(0).to(tl.int64) * HEADS + head) * splits + split
    best = tl.load(stats + 2 * place, mask=there, other=float("-inf"))
    total = tl.load(stats + 2 * place + 1, mask=there, other=0.0)
    base = tl.max(best, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight = tl.exp2(best - base)
    whole = there[:, None] & (column < DIM)[None, :]
    acc = tl.load(parts + (place * DIM)[:, None] + column[None, :], mask=whole, other=0.0)
    total = tl.sum(total * weight, 0)
    acc = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total) * value_scale
    to = out + ((start + query).to(tl.int64) * HEADS + head) * DIM
    tl.store(to + column, acc.to(out.dtype.element_ty), mask=column < DIM)
