"""Paged attention: tensors to the kernel in ``attention.cpp``."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ferrule_kernels.attention import ScoreOptions
from ferrule_kernels.cpu import library

LANES = 16  # keys of a tile; block sizes and head dims are multiples of it
DTYPES = (torch.bfloat16, torch.float32)
_EIGHTS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


class _Batch(ctypes.Structure):
    """`Batch` of the kernel, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "cache")),
        *((name, ctypes.c_void_p) for name in ("table", "query_start", "context_lens", "slots")),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "heads", "kv_heads", "dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("table_stride", "cache_stride", "q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_int64) for name in ("window", "chunk", "value_dim", "eights")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("slopes", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
    ]


class Rows:
    """The places of a step's tokens in the KV cache, made once per step and group of layers.

    `table` int32 [rows, blocks]; `query_start` int32 [rows + 1]; `context_lens` int32 [rows]; `slots` int64 [tokens].
    """

    def __init__(
        self,
        table: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        slots: torch.Tensor,
        block_size: int,
        window: int = 0,
    ) -> None:
        self._kept = (table.contiguous(), query_start, context_lens, slots)  # their memory must outlive the calls
        self.addresses = tuple(x.data_ptr() for x in self._kept)
        self.count, self.width = len(context_lens), self._kept[0].stride(0)
        self.block_size = block_size
        self.window = window


def cache_shape(num_blocks: int, block_size: int, kv_heads: int, dim: int, latent: bool = False) -> tuple[int, ...]:
    """Return the shape of a KV cache: keys at [:, 0] and values at [:, 1]; `latent` values are a part of the keys.

    The order of the numbers within a head is private to the kernel.
    """
    return (num_blocks, 1 if latent else 2, kv_heads, block_size * dim)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    rows: Rows,
    options: ScoreOptions,
    window: int = 0,
    chunk: int = 0,
) -> torch.Tensor:
    """Write k and v [tokens, kv_heads, dim] to the cache, and attend with q [tokens, heads, dim].

    Where the cache has room for keys alone, v is a view of k's first numbers, of which the result has as many.

    All of one type of `DTYPES`; the cache may also be float8_e4m3fn or float8_e5m2, and then holds what was rounded to
    nearest, at most the type's largest number. Raises KernelsUnavailableError.
    """
    q, k = _rows_of_heads(q), _rows_of_heads(k)
    latent, value_dim = cache.shape[1] == 1, v.shape[2]
    v = k if latent else _rows_of_heads(v)
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype)
    slopes = torch.tensor(options.alibi_slopes, dtype=torch.float32) if options.alibi_slopes else None
    sinks = options.sinks.float().contiguous() if options.sinks is not None else None
    # Fields in their order, without a loop: this runs once per layer of every step.
    batch = _Batch(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), cache.data_ptr()),
        *rows.addresses,
        *(rows.count, tokens, heads, k.shape[1], dim, rows.block_size, rows.width, cache.stride(0)),
        *(q.stride(0), k.stride(0), v.stride(0), window, chunk, value_dim if latent else 0),
        *(_EIGHTS.get(cache.dtype, 0), options.scale, options.soft_cap),
        *(_at(slopes), _at(sinks)),
    )
    kernels: Any = library.load()
    call = kernels.ferrule_attend_bf16 if q.dtype == torch.bfloat16 else kernels.ferrule_attend_f32
    call(ctypes.byref(batch))
    return out


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x, copied unless its heads lie side by side: the kernel has a stride for tokens, but none for heads."""
    _, between, within = x.stride()
    return x if within == 1 and between == x.shape[2] else x.contiguous()


def _at(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
