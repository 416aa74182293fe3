"""The common parts of products with quantized weights: tiles, splits of the inputs, and scaling of the sums.

The time of a product of few rows is that of reading the weights. There are then fewer tiles than the device has
multiprocessors, so the inputs are split too: each part gives its own sums, and a second kernel adds them up in their
order. Nothing is added atomically, so a result has the same bits every time. How a product is cut depends on its shape
and the device: sums of floats may differ in the last bit between few rows and many, sums of integers do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

VARYING = ("m", "steps")  # from batch to batch: no reason to compile anew
SWATHE = 8  # tiles of rows that share a tile of weights one after the other, while the cache has it
_MOST_SPLITS = 16
_FEWEST_STEPS = 4  # of a split: its loads hide each other's latency
_PER_UNIT = 4  # programs that keep a multiprocessor's memory requests flowing
_FEW = 64  # rows


@dataclass(frozen=True)
class Tile:
    """The tile of a program: `rows` x `columns`, `depth` inputs at a time, of which up to `stages` are being loaded."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def fitting(tile: Tile, num_bytes: int, device: torch.device) -> Tile:
    """Return `tile` with as many of its stages, of `num_bytes` each, as fit the shared memory of a block of threads."""
    if device.type != "cuda":
        return tile
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    stages = int(properties.shared_memory_per_block_optin) // num_bytes
    return Tile(tile.rows, tile.columns, tile.depth, tile.warps, max(1, min(tile.stages, stages)))


def splits(rows: int, tiles: int, steps: int, device: torch.device) -> int:
    """Return how many parts to cut the inputs into: four programs per multiprocessor, of four steps or more each."""
    if rows > _FEW or device.type != "cuda":
        return 1
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(_PER_UNIT * units // tiles, steps // _FEWEST_STEPS, _MOST_SPLITS))


@dataclass(frozen=True)
class Cut:
    """The division of a product: the result into `tiles`, and the steps into `parts` of `per` each."""

    tiles: int
    parts: int
    per: int

    def sums(self, out: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the tensor that the programs write to: the result itself, or new sums [parts, m, n] for `add`."""
        return out if self.parts == 1 else torch.empty((self.parts, *out.shape), dtype=dtype, device=out.device)


def cut(tile: Tile, m: int, n: int, k: int, device: torch.device, num_splits: int = 0) -> Cut:
    """Divide the product with a result [m, n] of k inputs. `num_splits` is chosen if it is 0."""
    tiles, steps = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns), triton.cdiv(k, tile.depth)
    per = triton.cdiv(steps, num_splits or splits(m, tiles, steps, device))
    return Cut(tiles, triton.cdiv(steps, per), per)


@triton.jit
def place(index, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWATHE: tl.constexpr):
    """Return (tile of rows, tile of columns) of a program: neighbours share weights within a swathe of rows."""
    down = tl.cdiv(m, ROWS)
    across = tl.cdiv(n, COLUMNS)
    first = index // (SWATHE * across) * SWATHE
    height = tl.minimum(down - first, SWATHE)
    inside = index % (SWATHE * across)
    return first + inside % height, inside // height


@triton.jit
def finished(total, row_scales, column_scales, bias, rows, columns, m, n):
    """Apply scales and bias to sums [rows, columns], in float32. A factor that is None is left out."""
    y = total.to(tl.float32)
    if row_scales is not None:
        y = y * tl.load(row_scales + rows, mask=rows < m, other=0.0)[:, None]
    if column_scales is not None:
        y = y * tl.load(column_scales + columns, mask=columns < n, other=0.0)[None, :]
    if bias is not None:
        y = y + tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=VARYING)
def _add(
    parts, row_scales, column_scales, bias, out, m, n, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    total = tl.load(parts + at, mask=inside, other=0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + part * m * n + at, mask=inside, other=0)
    y = finished(total, row_scales, column_scales, bias, rows, columns, m, n)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def add(
    parts: torch.Tensor,
    out: torch.Tensor,
    row_scales: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Add up the splits' sums [splits, m, n] to the result [m, n]."""
    _, m, n = parts.shape
    grid = (triton.cdiv(m, 4), triton.cdiv(n, 256))
    _add[grid](parts, row_scales, column_scales, bias, out, m, n, SPLITS=parts.shape[0], ROWS=4, COLUMNS=256)
