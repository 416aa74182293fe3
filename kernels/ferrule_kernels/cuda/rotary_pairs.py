"""Functions of the kernels that normalise and rotate heads: features are loaded and stored in the pairs that rotate."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weighted(x, weight, offset, column, inside, dtype: tl.constexpr):
    """Multiply normalised x [heads, columns] by the norm's factor, rounding where `norms` rounds."""
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)[None, :]
    rounded = x.to(dtype).to(tl.float32) * factor
    return tl.where(offset != 0.0, x * (factor + offset), rounded).to(dtype).to(tl.float32)


@triton.jit
def product(x, factor, dtype: tl.constexpr):
    """Multiply x by a factor, rounded to `dtype` as torch rounds it."""
    return (x * factor).to(dtype).to(tl.float32)


@triton.jit
def load_pairs(at, heads_inside, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the two features of each pair, float32 [heads, PAIRS] each; neighbours are read together, then parted."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(at + column, heads_inside & (column < 2 * HALF), 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [both.shape[0], PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = heads_inside & (pair < HALF)
        a = tl.load(at + pair, inside, 0.0).to(tl.float32)
        b = tl.load(at + HALF + pair, inside, 0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(at, a, b, heads_inside, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Write what `load_pairs` read to where it was."""
    dtype: tl.constexpr = at.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), [a.shape[0], 2 * PAIRS])
        tl.store(at + column, both, heads_inside & (column < 2 * HALF))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = heads_inside & (pair < HALF)
        tl.store(at + pair, a.to(dtype), inside)
        tl.store(at + HALF + pair, b.to(dtype), inside)
