"""Writing keys and values to the paged cache: alone, or in one pass with norms and rotation of the heads.

The cache is that of `attention.cache_shape`, [blocks, 2, kv_heads, block_size, dim], of the heads' type or of 8 bits.
A token goes to block slot // block_size, place slot % block_size; one whose slot is negative is not written. In 8 bits
an entry is x / scale, rounded to nearest even and clamped to the range of the type; NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.norms import RMSNorm
from ferrule_kernels.cuda.rope import Heads
from ferrule_kernels.cuda.rotary_pairs import load_pairs, product, store_pairs, weighted
from ferrule_kernels.cuda.tiles import power_of_2, warps

_ELEMENTS = 1024  # of a program's heads
_UNLIMITED = 0.0


@triton.jit
def _narrowed(x, factor, LIMIT: tl.constexpr):
    """Multiply x by the factor and clamp it, as the cache stores it, before its type is changed."""
    if LIMIT > 0:  # the compiler does not take a bare float as a condition
        x = x.to(tl.float32) * factor
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x


@triton.jit
def _write_kernel(
    k,
    v,
    cache,
    slots,
    k_token,  # strides
    k_head,
    v_token,
    v_head,
    block_stride,
    value_stride,
    k_factor,
    v_factor,
    LIMIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, D)[None, :]
    inside = (head < KV_HEADS) & (column < DIM)
    to = cache + slot // BLOCK_SIZE * block_stride + (slot % BLOCK_SIZE) * DIM + head * (BLOCK_SIZE * DIM) + column
    entry = tl.load(k + token * k_token + head * k_head + column, mask=inside, other=0.0)
    tl.store(to, _narrowed(entry, k_factor, LIMIT).to(cache.dtype.element_ty), mask=inside)
    entry = tl.load(v + token * v_token + head * v_head + column, mask=inside, other=0.0)
    tl.store(to + value_stride, _narrowed(entry, v_factor, LIMIT).to(cache.dtype.element_ty), mask=inside)


@triton.jit
def _turn_and_write_kernel(
    x,  # query heads, key heads and value heads of each token
    cos,  # None without a rotation, as sin is
    sin,
    q_weight,  # None without norms, as k_weight is
    k_weight,
    cache,
    slots,
    x_stride,
    turn_stride,
    block_stride,
    value_stride,
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    k_factor,
    v_factor,
    LIMIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # of the features that turn
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PAIRS: tl.constexpr,  # HALF, or the power of two above it
    REST: tl.constexpr,  # the same for the features that do not turn; 0 without any
):
    """Process queries, keys or values of one token. Queries stay where they are; keys and values go to the cache."""
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    slot = tl.load(slots + token)
    to = cache + tl.maximum(slot, 0) // BLOCK_SIZE * block_stride + (tl.maximum(slot, 0) % BLOCK_SIZE) * DIM
    written = tl.where(slot < 0, 0, K_HEADS)  # heads
    if number >= Q_BLOCKS + K_BLOCKS:
        own = (number - Q_BLOCKS - K_BLOCKS) * HEADS + tl.arange(0, HEADS)[:, None]
        column = tl.arange(0, D)[None, :]
        valued = (own < written) & (column < DIM)
        v = tl.load(x + token * x_stride + (Q_HEADS + K_HEADS + own) * DIM + column, mask=valued, other=0.0)
        value_kept = _narrowed(v, v_factor, LIMIT).to(cache.dtype.element_ty)
        tl.store(to + value_stride + own * (BLOCK_SIZE * DIM) + column, value_kept, mask=valued)
    else:
        is_query = number < Q_BLOCKS
        head = tl.where(is_query, number * HEADS, (number - Q_BLOCKS) * HEADS) + tl.arange(0, HEADS)[:, None]
        inside = head < tl.where(is_query, Q_HEADS, K_HEADS)
        at = x + token * x_stride + (tl.where(is_query, 0, Q_HEADS) + head) * DIM
        pair = tl.arange(0, PAIRS)
        rest = 2 * HALF + tl.arange(0, REST if REST else 1)
        staying = inside & (rest < DIM)[None, :]
        if HALF:
            a, b = load_pairs(at, inside, HALF, PAIRS, INTERLEAVED)
        if REST:
            c = tl.load(at + rest[None, :], staying, 0.0).to(tl.float32)
        if q_weight is not None:
            weight, eps, offset = k_weight, k_eps, k_offset
            if is_query:
                weight, eps, offset = q_weight, q_eps, q_offset
            squares = tl.zeros([HEADS], tl.float32)
            if HALF:
                squares += tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if REST:
                squares += tl.sum(c * c, 1)
            scale = tl.rsqrt(squares / DIM + eps)[:, None]
            if HALF:
                first = 2 * pair if INTERLEAVED else pair
                second = 2 * pair + 1 if INTERLEAVED else HALF + pair
                a = weighted(a * scale, weight, offset, first, pair < HALF, dtype)
                b = weighted(b * scale, weight, offset, second, pair < HALF, dtype)
            if REST:
                c = weighted(c * scale, weight, offset, rest, rest < DIM, dtype)
        if HALF:
            turn = token * turn_stride + pair
            cosine = tl.load(cos + turn, pair < HALF, 0.0).to(tl.float32)[None, :]
            sine = tl.load(sin + turn, pair < HALF, 0.0).to(tl.float32)[None, :]
            turned = product(a, cosine, dtype) - product(b, sine, dtype)
            b = (product(b, cosine, dtype) + product(a, sine, dtype)).to(dtype)
            a = turned.to(dtype)
        if is_query:
            if HALF:
                store_pairs(at, a, b, inside, HALF, PAIRS, INTERLEAVED)
            if REST:
                tl.store(at + rest[None, :], c.to(dtype), staying)
        else:  # names of their own: a branch cannot change the type of what was there before
            kept, staying = to + head * (BLOCK_SIZE * DIM), staying & (head < written)
            if HALF:
                first_kept, second_kept = _narrowed(a, k_factor, LIMIT), _narrowed(b, k_factor, LIMIT)
                store_pairs(kept, first_kept, second_kept, inside & (head < written), HALF, PAIRS, INTERLEAVED)
            if REST:
                rest_kept = _narrowed(c.to(dtype), k_factor, LIMIT)
                tl.store(kept + rest[None, :], rest_kept.to(cache.dtype.element_ty), staying)


def write_cache(
    cache: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Put k and v [tokens, kv_heads, dim] at `slots` [tokens] int64 of `cache`."""
    tokens, kv_heads, dim = k.shape
    k, v = (side if side.stride(2) == 1 else side.contiguous() for side in (k, v))
    heads = _heads_per_program(dim, kv_heads)
    _write_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        k, v, cache, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.stride(0), cache.stride(1),
        1.0 / scales[0], 1.0 / scales[1], LIMIT=_limit(cache.dtype), KV_HEADS=kv_heads, DIM=dim, D=power_of_2(dim),
        BLOCK_SIZE=cache.shape[3], HEADS=heads, num_warps=warps(heads * power_of_2(dim)),
    )  # fmt: skip


class CachedHeads(Heads):
    """`Heads` that can put what they have turned into the cache."""

    def write(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Turn the queries of x [tokens, query, key and value heads, dim] in place; put keys, turned, and values into
        `cache` at `slots` [tokens] int64. Keys and values of x stay as they are.
        """
        cos, sin = (None, None) if rotation is None or not self._turned else rotation
        q_norm, k_norm = self._norms or (None, None)
        half = 0 if cos is None else self._turned // 2
        rest = self._dim - 2 * half
        heads = _heads_per_program(self._dim, max(self._q_heads, self._k_heads))
        blocks = triton.cdiv(self._q_heads, heads) + 2 * triton.cdiv(self._k_heads, heads)
        _turn_and_write_kernel[(x.shape[0], blocks)](
            x, cos, sin, None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
            cache, slots, x.stride(0), 0 if cos is None else cos.stride(0), cache.stride(0), cache.stride(1),
            0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps,
            0.0 if q_norm is None else q_norm.offset, 0.0 if k_norm is None else k_norm.offset,
            1.0 / scales[0], 1.0 / scales[1], LIMIT=_limit(cache.dtype),
            Q_HEADS=self._q_heads, K_HEADS=self._k_heads, DIM=self._dim, D=power_of_2(self._dim),
            BLOCK_SIZE=cache.shape[3], HALF=half, INTERLEAVED=self._interleaved, HEADS=heads,
            PAIRS=power_of_2(max(1, half)), REST=power_of_2(rest) if rest else 0,
            num_warps=warps(heads * power_of_2(self._dim)),
        )  # fmt: skip


def _heads_per_program(dim: int, heads: int) -> int:
    return max(1, min(_ELEMENTS // power_of_2(dim), power_of_2(heads)))


def _limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.itemsize == 1 else _UNLIMITED


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of heads of 0.6B and 8B models, in decode and prefill, and a small one without a GPU."""
    shapes = ((64, 16, 8, 128, True), (64, 32, 8, 128, False), (8192, 32, 8, 128, False))
    for tokens, q_heads, k_heads, dim, normed in shapes if device.type == "cuda" else ((4, 4, 2, 16, True),):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        x = torch.randn(tokens, q_heads + 2 * k_heads, dim, dtype=dtype, device=device)
        norms = [RMSNorm(torch.ones(dim, dtype=dtype, device=device), 1e-6)] * 2 if normed else []
        angles = torch.rand(tokens, 1, dim // 2, device=device)
        rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        slots = torch.randperm(tokens, device=device) + 16
        kernel = CachedHeads((q_heads, k_heads), dim, norms, dim, interleaved=False)
        for kind in (dtype, torch.float8_e4m3fn):
            cache = torch.zeros(tokens // 16 + 2, 2, k_heads, 16, dim, dtype=kind, device=device)
            written = 2 * tokens * k_heads * dim * kind.itemsize
            moved = x.nbytes + x[:, :q_heads].numel() * dtype.itemsize + 2 * rotation[0].nbytes + written
            name = f"{'norms + ' if normed else ''}rope + cache {tokens}x{q_heads}+{k_heads}x{dim}"
            name += " to 8 bits" if kind != dtype else ""
            yield Case(name, partial(kernel.write, x, rotation, cache, slots), moved)
        k, v = x[:, q_heads : q_heads + k_heads], x[:, q_heads + k_heads :]
        cache = torch.zeros(tokens // 16 + 2, 2, k_heads, 16, dim, dtype=dtype, device=device)
        yield Case(
            f"cache {tokens}x{k_heads}x{dim}", partial(write_cache, cache, slots, k, v), 4 * k.numel() * dtype.itemsize
        )
