"""Routing to experts, and the sorting of rows into blocks of one expert each, without waiting for the device.

The order of rows is exactly that of the reference in `ferrule_kernels.moe`, because there are no atomic additions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.tiles import power_of_2
from ferrule_kernels.moe import Blocks, Routing, max_blocks

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: below every score, above what is taken
_CHUNK = 1024  # ids that a program looks at at a time


@triton.jit
def _take_best(choice, place):
    """Return the first place of the largest number, and the numbers with -inf in its place."""
    best = tl.min(tl.where(choice == tl.max(choice, 0), place, 1 << 30), 0)
    return best, tl.where(place == best, float("-inf"), choice)


@triton.jit
def _route_kernel(
    logits,
    bias,  # or None
    weights,
    ids,
    stride,
    scale,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    DEPTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,  # the power of two that is not below GROUPS
    COLUMNS: tl.constexpr,  # the one that is not below GROUP_SIZE
    CHOICES: tl.constexpr,  # the one that is not below TOP_K
):
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    wide = tl.load(logits + token * stride + expert, exists, float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(wide)
    else:
        powers = tl.exp(wide - tl.max(tl.max(wide, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, exists, 0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, _LOWEST)
    choice = tl.where(exists, choice, float("-inf"))
    if KEPT < GROUPS:
        worth = tl.max(choice, 1)
        if DEPTH == 2:
            first = tl.min(tl.where(choice == worth[:, None], member[None, :], COLUMNS), 1)
            worth += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), 1)
        worth = tl.where(group < GROUPS, tl.maximum(worth, _LOWEST), float("-inf"))
        kept = group < 0
        for _ in tl.static_range(KEPT):
            best, worth = _take_best(worth, group)
            kept = kept | (group == best)
        choice = tl.where(kept[:, None], choice, float("-inf"))

    choice = tl.reshape(choice, [ROWS * COLUMNS])
    scores = tl.reshape(scores, [ROWS * COLUMNS])
    place = tl.arange(0, ROWS * COLUMNS)
    slot = tl.arange(0, CHOICES)
    chosen = tl.zeros([CHOICES], tl.int32)
    weight = tl.zeros([CHOICES], tl.float32)
    for index in tl.static_range(TOP_K):
        best, choice = _take_best(choice, place)
        score = tl.sum(tl.where(place == best, scores, 0.0), 0)
        chosen = tl.where(slot == index, best // COLUMNS * GROUP_SIZE + best % COLUMNS, chosen)
        weight = tl.where(slot == index, score, weight)
    if RENORMALISE:
        weight /= tl.sum(weight, 0) + 1e-20
    tl.store(weights + token * TOP_K + slot, weight * scale, slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, chosen, slot < TOP_K)


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts like `ferrule_kernels.moe.route`: weights float32 and ids int32, [tokens, top_k].

    Each token has a program of its own.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = logits.shape[0]
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    rows, columns = power_of_2(routing.groups), power_of_2(routing.group_size)
    _route_kernel[(tokens,)](
        logits,
        bias,
        weights,
        ids,
        logits.stride(0),
        float(routing.scale),
        TOP_K=routing.top_k,
        GROUPS=routing.groups,
        GROUP_SIZE=routing.group_size,
        KEPT=routing.kept_groups,
        DEPTH=routing.group_depth,
        SIGMOID=routing.scores == "sigmoid",
        RENORMALISE=routing.renormalise,
        ROWS=rows,
        COLUMNS=columns,
        CHOICES=power_of_2(routing.top_k),
        num_warps=1 if rows * columns <= 256 else 2,  # a warp needs no other to find the largest of its numbers
    )
    return weights, ids


@triton.jit(do_not_specialize=["count"])
def _count_kernel(ids, counts, count, CHUNK: tl.constexpr):
    expert, place = tl.program_id(0), tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, count, CHUNK):
        found += (tl.load(ids + start + place, start + place < count, -1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["count", "blocks"])
def _place_kernel(
    ids,
    counts,
    rows,
    owners,
    count,
    blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # the power of two that is not below NUM_EXPERTS
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the rows and blocks of expert e, by program e; one program more marks the blocks that no expert has."""
    expert, place = tl.program_id(0), tl.arange(0, CHUNK)
    every = tl.arange(0, EXPERTS)
    whole = (tl.load(counts + every, every < NUM_EXPERTS, 0) + SIZE - 1) // SIZE
    first = tl.sum(tl.where(every < expert, whole, 0), 0)
    if expert == NUM_EXPERTS:
        for start in range(first, blocks, CHUNK):
            tl.store(owners + start + place, tl.full([CHUNK], -1, tl.int32), start + place < blocks)
    else:
        mine = tl.sum(tl.where(every == expert, whole, 0), 0)
        for start in range(0, mine, CHUNK):
            tl.store(owners + first + start + place, tl.zeros([CHUNK], tl.int32) + expert, start + place < mine)
        at, end = first * SIZE, (first + mine) * SIZE
        for start in range(0, count, CHUNK):
            row = start + place
            here = tl.load(ids + row, row < count, -1) == expert
            before = tl.cumsum(here.to(tl.int32), 0)
            tl.store(rows + at + before - 1, row, here)
            at += tl.sum(here.to(tl.int32), 0)
        for start in range(at, end, CHUNK):  # less than a block
            tl.store(rows + start + place, tl.zeros([CHUNK], tl.int32) + count, start + place < end)


def align(ids: torch.Tensor, num_experts: int, size: int) -> Blocks:
    """Align rows like `ferrule_kernels.moe.align`, for ids int32 [tokens, top_k].

    Each expert's program reads all ids, twice. That is more reading than a sort needs, but takes two launches whatever
    the numbers are; 64k ids fit the cache.
    """
    ids = ids.contiguous()
    count, device = ids.numel(), ids.device
    blocks = max_blocks(count, num_experts, size)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    rows = torch.empty(blocks * size, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    chunk = min(_CHUNK, max(16, power_of_2(max(1, count))))
    _count_kernel[(num_experts,)](ids, counts, count, CHUNK=chunk, num_warps=4)
    _place_kernel[(num_experts + 1,)](
        ids,
        counts,
        rows,
        owners,
        count,
        blocks,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_2(num_experts),
        SIZE=size,
        CHUNK=chunk,
        num_warps=4,
    )
    return Blocks(rows, owners, count, size)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of the routers of Qwen3-30B-A3B and DeepSeek-V3, for a step of decode and one of prefill."""
    qwen = Routing(num_experts=128, top_k=8)
    deepseek = Routing(num_experts=256, top_k=8, scores="sigmoid", groups=8, kept_groups=4, group_depth=2, scale=2.5)
    for tokens in (64, 8192) if device.type == "cuda" else (4,):
        for name, routing in (("qwen3", qwen), ("deepseek-v3", deepseek)):
            logits = torch.randn(tokens, routing.num_experts, device=device)
            bias = torch.zeros(routing.num_experts, device=device) if routing.scores == "sigmoid" else None
            _, ids = route(logits, routing, bias)
            yield Case(f"route {name} {tokens}", partial(route, logits, routing, bias), logits.nbytes + 2 * ids.nbytes)
            yield Case(f"align {name} {tokens}", partial(align, ids, routing.num_experts, 64), 2 * ids.nbytes)
