"""Norms and rotary embedding (Su et al. 2021) of queries and keys, in place in the output of their projection.

Arithmetic is float32, rounded where the same computation in single torch operations rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from ferrule_kernels.cuda.cases import Case
from ferrule_kernels.cuda.norms import RMSNorm
from ferrule_kernels.cuda.rotary_pairs import load_pairs, product, store_pairs, weighted
from ferrule_kernels.cuda.tiles import power_of_2, warps

_ELEMENTS = 1024  # of a program's heads


@triton.jit
def _heads_kernel(
    x,
    cos,  # None without a rotation, as sin is
    sin,
    q_weight,  # None without norms, as k_weight is
    k_weight,
    x_stride,
    turn_stride,
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the features that turn
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PAIRS: tl.constexpr,  # HALF, or the power of two above it
    REST: tl.constexpr,  # the same for the features that only a norm changes; 0 without any
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    is_query = block < Q_BLOCKS  # a program has queries or keys, not both
    head = tl.where(is_query, block * HEADS, Q_HEADS + (block - Q_BLOCKS) * HEADS) + tl.arange(0, HEADS)[:, None]
    inside = head < tl.where(is_query, Q_HEADS, Q_HEADS + K_HEADS)
    at = x + token * x_stride + head * DIM
    pair = tl.arange(0, PAIRS)
    rest = 2 * HALF + tl.arange(0, REST if REST else 1)
    if HALF:
        a, b = load_pairs(at, inside, HALF, PAIRS, INTERLEAVED)
    if REST:
        staying = inside & (rest < DIM)[None, :]
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
            tl.store(at + rest[None, :], c.to(dtype), staying)
    if HALF:
        if cos is not None:
            turn = token * turn_stride + pair
            cosine = tl.load(cos + turn, pair < HALF, 0.0).to(tl.float32)[None, :]
            sine = tl.load(sin + turn, pair < HALF, 0.0).to(tl.float32)[None, :]
            turned = product(a, cosine, dtype) - product(b, sine, dtype)
            b = product(b, cosine, dtype) + product(a, sine, dtype)
            a = turned
        store_pairs(at, a, b, inside, HALF, PAIRS, INTERLEAVED)


class Heads:
    """Optional norms, and rotation, of the first query and key heads of rows that hold more, in place."""

    def __init__(
        self, heads: tuple[int, int], dim: int, norms: Sequence[RMSNorm], turned: int, interleaved: bool
    ) -> None:
        """Keep the sizes and norms.

        `norms` are of one query head and one key head, or empty; `turned` counts rotated features, from the first.
        """
        self._q_heads, self._k_heads = heads
        self._dim, self._turned, self._interleaved = dim, turned, interleaved
        self._norms = tuple(norms)

    def accepts(self, x: torch.Tensor) -> bool:
        known = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return known and all(norm.dtype == x.dtype for norm in self._norms)

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Normalise and rotate x [tokens, at least query and key heads, dim] in place.

        `rotation` is cos and sin, each [tokens, 1, turned / 2] of x's type.
        """
        cos, sin = (None, None) if rotation is None or not self._turned else rotation
        q_norm, k_norm = self._norms or (None, None)
        if cos is None and q_norm is None:
            return
        half = 0 if cos is None else self._turned // 2
        rest = 0 if q_norm is None else self._dim - 2 * half
        per_program = max(1, _ELEMENTS // power_of_2(self._dim))
        blocks = triton.cdiv(self._q_heads, per_program) + triton.cdiv(self._k_heads, per_program)
        _heads_kernel[(x.shape[0], blocks)](
            x,
            cos,
            sin,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            x.stride(0),
            0 if cos is None else cos.stride(0),
            0.0 if q_norm is None else q_norm.eps,
            0.0 if k_norm is None else k_norm.eps,
            0.0 if q_norm is None else q_norm.offset,
            0.0 if k_norm is None else k_norm.offset,
            Q_HEADS=self._q_heads,
            K_HEADS=self._k_heads,
            DIM=self._dim,
            HALF=half,
            INTERLEAVED=self._interleaved,
            HEADS=per_program,
            PAIRS=power_of_2(max(1, half)),
            REST=power_of_2(rest) if rest else 0,
            num_warps=warps(per_program * power_of_2(self._dim) // 2),  # a thread has both features of its pairs
        )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of decode and prefill with the heads of 0.6B, 8B and 14B models.

    Rows hold values too, left untouched.
    """
    shapes = ((1, 32, 8, False), (64, 16, 8, True), (256, 40, 8, True), (8192, 32, 8, False))
    for tokens, q_heads, k_heads, normed in shapes if device.type == "cuda" else ((4, 4, 2, True),):
        x = torch.randn(tokens, q_heads + 2 * k_heads, 128, dtype=torch.bfloat16, device=device)
        weight = torch.ones(128, dtype=torch.bfloat16, device=device)
        norms = [RMSNorm(weight, 1e-6)] * 2 if normed else []
        angles = torch.rand(tokens, 1, 64, device=device)
        rotation = angles.cos().bfloat16(), angles.sin().bfloat16()
        kernel = Heads((q_heads, k_heads), 128, norms, 128, interleaved=False)
        name = f"{'norms + ' if normed else ''}rope {tokens}x{q_heads}+{k_heads}x128"
        moved = 2 * x[:, : q_heads + k_heads].numel() * x.element_size() + 2 * rotation[0].nbytes
        yield Case(name, partial(kernel, x, rotation), moved)
