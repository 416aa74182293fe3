"""Products of rows with the matrices of their experts, and the weighted sum of the results of each token.

Rows come sorted into blocks of one expert each (`moe.align`). A program multiplies one block by a tile of columns on
the tensor cores, sums in float32, and writes each row to its own place: nothing is added atomically, so a result has
the same bits every time. The number of blocks is never read back from the device: programs of unused blocks return at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.gates import GATES, activate
from ferrule_kernels.cuda.moe import align
from ferrule_kernels.cuda.products import Tile
from ferrule_kernels.cuda.tiles import power_of_2, warps
from ferrule_kernels.moe import Blocks

_SWATHE = 8  # blocks that share a tile of weights one after the other, while the cache has it


def tile(rows_per_expert: int, dtype: torch.dtype) -> Tile:
    """Choose the tile for an average number of rows of an expert.

    With few rows, reading the weights is all there is to do, so a tile is low, and many tiles keep the memory busy.
    With many, tiles are 128 x 128, which two groups of warps multiply on the matrix units of Hopper. A step of depth is
    128 bytes of a row.
    """
    depth = 32 if dtype == torch.float32 else 64
    if rows_per_expert <= 16:
        return Tile(16, 64, depth, warps=4, stages=4)
    if rows_per_expert <= 32:
        return Tile(32, 64, depth, warps=4, stages=4)
    if rows_per_expert <= 64:
        return Tile(64, 128, depth, warps=4, stages=3)
    return Tile(128, 128, depth, warps=8, stages=3)


@lru_cache(maxsize=64)
def _shared_bytes(device: int) -> int:
    """Return how many bytes of shared memory a program may use."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def _stages(shape: Tile, halves: int, x: torch.Tensor) -> int:
    """Return how many stages fit the shared memory, at most as many as the tile asks for."""
    if x.device.type != "cuda":
        return shape.stages
    stage = (shape.rows + halves * shape.columns) * shape.depth * x.element_size()
    return max(1, min(shape.stages, _shared_bytes(x.device.index or 0) // stage))


@triton.jit(do_not_specialize=["count", "blocks"])
def _multiply_kernel(
    x,
    weights,
    bias,  # or None
    factors,  # or None
    out,
    rows,
    owners,
    count,
    blocks,
    x_stride,
    SHARE: tl.constexpr,  # rows of the blocks that read one row of x: those of a token, or 1
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACT: tl.constexpr,  # or None; with one, the weights have a second half of rows, which it gates
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWATHE: tl.constexpr,
):
    # Programs run down a swathe of blocks before they go on to the next columns.
    column_tiles: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    swathe = tl.program_id(0) // (SWATHE * column_tiles)
    within = tl.program_id(0) % (SWATHE * column_tiles)
    high = tl.minimum(blocks - swathe * SWATHE, SWATHE)
    block, column_tile = swathe * SWATHE + within % high, within // high
    owner = tl.load(owners + block)
    if owner >= 0:
        dtype: tl.constexpr = out.dtype.element_ty
        row = tl.load(rows + block * BLOCK + tl.arange(0, BLOCK))
        exists = (row < count)[:, None]
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < OUTPUTS
        depth = tl.arange(0, DEPTH)
        halves: tl.constexpr = 1 if ACT is None else 2
        matrix = weights + owner.to(tl.int64) * (halves * OUTPUTS * INPUTS)
        a_at = x + (row // SHARE).to(tl.int64)[:, None] * x_stride + depth[None, :]
        b_at = matrix + column.to(tl.int64)[None, :] * INPUTS + depth[:, None]
        y = tl.zeros([BLOCK, COLUMNS], tl.float32)
        up = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for start in range(0, INPUTS, DEPTH):
            left = depth < INPUTS - start
            a = tl.load(a_at + start, exists & left[None, :], 0.0)
            b_inside = left[:, None] & inside[None, :]
            y = tl.dot(a, tl.load(b_at + start, b_inside, 0.0), y, input_precision="ieee")
            if ACT is not None:
                other = tl.load(b_at + OUTPUTS * INPUTS + start, b_inside, 0.0)
                up = tl.dot(a, other, up, input_precision="ieee")
        if bias is not None:
            b_row = bias + owner * (halves * OUTPUTS) + column
            y += tl.load(b_row, inside, 0.0).to(tl.float32)[None, :]
            if ACT is not None:
                up += tl.load(b_row + OUTPUTS, inside, 0.0).to(tl.float32)[None, :]
        if ACT is not None:
            y = activate(y, ACT).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        if factors is not None:
            y *= tl.load(factors + row, row < count, 0.0)[:, None]
        at = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(at, y.to(dtype), exists & inside[None, :])


def multiply(
    x: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    shape: Tile,
    *,
    bias: torch.Tensor | None = None,
    act: str | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row of `blocks` by the transposed matrix of its expert: [num_rows, outputs] of x's type.

    x [num_rows, inputs], or [tokens, inputs] where the rows of a token all read the token's; weights [experts, outputs,
    inputs] and bias [experts, outputs]. With `act`, a name in `GATES`, the outputs of the matrices are gates and then
    ups, and the result is act(gate) * up. `factors` float32 [num_rows] multiply the result before it is rounded. Rows
    that are in no block are not written. Raises ValueError where blocks and tile, or x and rows, do not fit each other.
    """
    halves = 1 if act is None else 2
    inputs, outputs = weights.shape[2], weights.shape[1] // halves
    if blocks.size != shape.rows or x.shape[1] != inputs or (x.shape[0] and blocks.num_rows % x.shape[0]):
        raise ValueError(
            f"{blocks.num_rows} rows in blocks of {blocks.size}, x {tuple(x.shape)}, weights {tuple(weights.shape)} "
            f"and tiles of {shape.rows} rows do not fit each other."
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((blocks.num_rows, outputs), dtype=x.dtype, device=x.device)
    count = blocks.experts.shape[0]
    _multiply_kernel[(count * triton.cdiv(outputs, shape.columns),)](
        x,
        weights.contiguous(),
        bias,
        factors,
        out,
        blocks.rows,
        blocks.experts,
        blocks.num_rows,
        count,
        x.stride(0),
        SHARE=blocks.num_rows // max(1, x.shape[0]) or 1,
        INPUTS=inputs,
        OUTPUTS=outputs,
        ACT=None if act is None else GATES[act],
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        DEPTH=shape.depth,
        SWATHE=_SWATHE,
        num_warps=shape.warps,
        num_stages=_stages(shape, halves, x),
    )
    return out


def product(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply each row of x [rows, inputs] by the transposed matrix of its expert, ids int32 [rows], in two launches.

    Weights [experts, outputs, inputs] and a bias [experts, outputs].
    """
    shape = tile(triton.cdiv(ids.numel(), weights.shape[0]), x.dtype)
    return multiply(x, weights, align(ids.unsqueeze(1), weights.shape[0], shape.rows), shape, bias=bias)


@triton.jit
def _combine_kernel(
    x,
    ids,  # or None
    weights,  # or None
    places,  # or None
    out,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        size = SIZE
        if ids is not None:
            size = tl.where(tl.load(ids + row) < 0, 0, SIZE)  # what is elsewhere was not written
        at = row if places is None else tl.load(places + row)
        numbers = tl.load(x + at * SIZE + column, column < size, 0.0).to(tl.float32)
        total += numbers if weights is None else numbers * tl.load(weights + row)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), column < SIZE)


def combine(
    x: torch.Tensor,
    shape: tuple[int, int],
    *,
    ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's rows, in their order: x [tokens * top_k, size] → [tokens, size], for a shape [tokens, top_k].

    Rows are skipped where `ids` are -1, and multiplied by `weights`. `places` int64 says where each row is.
    """
    tokens, top_k = shape
    size = x.shape[1]
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    block = min(1024, power_of_2(size))
    grid = (tokens, triton.cdiv(size, block))
    _combine_kernel[grid](x, ids, weights, places, out, SIZE=size, TOP_K=top_k, BLOCK=block, num_warps=warps(block))
    return out


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `ferrule_kernels.moe.combine` in one launch."""
    tokens, top_k = weights.shape
    return combine(rows.contiguous(), (tokens, top_k), weights=weights.float().contiguous(), places=places)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    act: str | Callable[[torch.Tensor], torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Compute experts like `ferrule_kernels.moe.experts`, with a name in `GATES`, always in five launches.

    `act` may also be a function of rows [gate, up], and x may have a row for each of a token's experts. `biases` are
    those of both products, [experts, outputs].
    """
    num_experts = gate_up.shape[0]
    shape = tile(triton.cdiv(ids.numel(), num_experts), x.dtype)
    ids = ids.contiguous()
    blocks = align(ids, num_experts, shape.rows)
    inner = multiply(x, gate_up, blocks, shape, bias=biases[0], act=act if isinstance(act, str) else None)
    if not isinstance(act, str):
        inner = act(inner)
    rows = multiply(inner, down, blocks, shape, bias=biases[1], factors=weights.contiguous())
    return combine(rows, (ids.shape[0], ids.shape[1]), ids=ids)


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of one layer's experts of Qwen3-30B-A3B, in decode and in prefill. Every expert is read once."""
    real = device.type == "cuda"
    num_experts, top_k, hidden, inner = (128, 8, 2048, 768) if real else (8, 2, 64, 32)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, dtype=torch.bfloat16, device=device) * 0.02
    down = torch.randn(num_experts, hidden, inner, dtype=torch.bfloat16, device=device) * 0.02
    for tokens in (1, 64, 256, 8192) if real else (4,):
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
        weights, ids = torch.rand(tokens, num_experts, device=device).topk(top_k)
        used = min(num_experts, tokens * top_k)
        moved = (gate_up[0].nbytes + down[0].nbytes) * used + 2 * x.nbytes * (1 + top_k)
        run = partial(experts, x, gate_up, down, weights, ids.int(), "silu")
        yield Case(f"experts {num_experts}x{hidden}x{inner} {tokens}", run, moved, 6 * tokens * top_k * hidden * inner)
