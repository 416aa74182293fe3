"""Layers with a state for each request: tensors to the kernels in ``short_conv.cpp``, ``selective.cpp``, ``delta.cpp``.

Each class is made once, when the weights are there, and keeps what it needs of them in float32. A call computes all
tokens of a step, many of a prompt or one of each request, and leaves each request's new state in its slot. A token's
result has the same bits alone, in a batch, and however its prompt is cut. All raise KernelsUnavailableError when made,
and ValueError for sizes that the kernel does not support.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ferrule_kernels.cpu.elementwise import functions

LANES = 16  # numbers of a vector; what the kernels walk along has a multiple of it
_MOST_TOKENS = 16  # of a convolution
_INT, _FLOAT, _AT = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Rows(Protocol):
    """The requests whose tokens are in a step, and their slots. Ferrule's `StateRows` provides them."""

    @property
    def data(self) -> torch.Tensor: ...  # [all slots, *shape]

    @property
    def slots(self) -> torch.Tensor: ...  # [rows] int64

    @property
    def query_start(self) -> torch.Tensor: ...  # [rows + 1] int64


class _Batch(ctypes.Structure):
    """`StateBatch` of the kernels, field by field."""

    _fields_ = [
        *((name, _AT) for name in ("data", "slots", "start")),
        *((name, _INT) for name in ("rows", "stride")),
    ]


class _Conv(ctypes.Structure):
    _fields_ = [
        *((name, _AT) for name in ("weight", "bias")),
        *((name, _INT) for name in ("channels", "kernel", "silu")),
    ]


class _Selective(ctypes.Structure):
    _fields_ = [
        *((name, _AT) for name in ("rate", "skip", "bias")),
        *((name, _INT) for name in ("heads", "dim", "states", "groups")),
        *((name, _FLOAT) for name in ("least", "most")),
    ]


class _Delta(ctypes.Structure):
    _fields_ = [
        *((name, _AT) for name in ("rate", "bias")),
        *((name, _INT) for name in ("key_heads", "heads", "keys", "values")),
        ("eps", _FLOAT),
    ]


def _batch(rows: Rows) -> Any:
    data, slots = rows.data, rows.slots
    return ctypes.byref(
        _Batch(data.data_ptr(), slots.data_ptr(), rows.query_start.data_ptr(), slots.numel(), data.stride(0))
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float().contiguous()


class ShortConv:
    """A causal convolution of each channel, and SiLU where `silu`: weight [channels, 1, kernel], bias [channels].

    x [tokens, channels], whose states [slots, kernel - 1, channels] have the same type.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> None:
        channels, _, kernel = weight.shape
        if kernel > _MOST_TOKENS:
            raise ValueError(f"a convolution has at most {_MOST_TOKENS} tokens, not {kernel}")
        self._kept = (_wide(weight.squeeze(1).t()), None if bias is None else _wide(bias))
        addresses = (None if each is None else each.data_ptr() for each in self._kept)
        self._constants = _Conv(*addresses, channels, kernel, silu)
        self._at = ctypes.addressof(self._constants)
        self._calls: Mapping[torch.dtype, Any] = functions("ferrule_short_conv", _AT, _AT, _AT, _INT, _AT)

    def accepts(self, x: torch.Tensor, rows: Rows) -> bool:
        return x.is_cpu and x.dtype in self._calls and rows.data.dtype is x.dtype

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._calls[x.dtype](self._at, _batch(rows), x.data_ptr(), x.stride(0), out.data_ptr())
        return out


class Selective:
    """Mamba 2's scan: from what the convolution gives to y, with the skipped input added. States are float32.

    `a_log`, `skip` and `bias` [heads]; `shape` heads, numbers of a head, and numbers of B for each of them; `limits`
    are the least and the largest step width.
    """

    def __init__(
        self,
        a_log: torch.Tensor,
        skip: torch.Tensor,
        bias: torch.Tensor,
        shape: tuple[int, int, int],
        groups: int,
        limits: tuple[float, float],
    ) -> None:
        heads, dim, states = shape
        if states % LANES or dim % 2:
            raise ValueError(f"the numbers of a state must be a multiple of {LANES} and those of a head even")
        self._shape = (heads, dim)
        self._kept = (_wide(-a_log.float().exp()), _wide(skip), _wide(bias))
        self._constants = _Selective(*(each.data_ptr() for each in self._kept), *shape, groups, *limits)
        self._at = ctypes.addressof(self._constants)
        self._calls: Mapping[torch.dtype, Any] = functions("ferrule_selective", _AT, _AT, _AT, _AT, _INT, _AT)

    def accepts(self, mixed: torch.Tensor) -> bool:
        return mixed.is_cpu and mixed.dtype in self._calls

    def __call__(self, mixed: torch.Tensor, width: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Compute a step: mixed [tokens, h and B and C], width [tokens, heads].

        Returns float32 [tokens, heads, dim].
        """
        mixed, width = mixed.contiguous(), width if width.stride(1) == 1 else width.contiguous()
        y = torch.empty((mixed.shape[0], *self._shape), dtype=torch.float32)
        call = self._calls[mixed.dtype]
        call(self._at, _batch(rows), mixed.data_ptr(), width.data_ptr(), width.stride(0), y.data_ptr())
        return y


class Delta:
    """The gated delta rule: from what the convolution gives to y. States are float32.

    `a_log` and `bias` [heads]; `shape` key heads, value heads, numbers of a key, and of a value; `eps` is added to the
    squared lengths of queries and keys.
    """

    def __init__(self, a_log: torch.Tensor, bias: torch.Tensor, shape: tuple[int, int, int, int], eps: float) -> None:
        _, heads, keys, values = shape
        if keys % LANES or values % LANES:
            raise ValueError(f"the numbers of a key and of a value must be multiples of {LANES}")
        self._shape = (heads, values)
        self._kept = (_wide(-a_log.float().exp()), _wide(bias))
        self._constants = _Delta(*(each.data_ptr() for each in self._kept), *shape, eps)
        self._at = ctypes.addressof(self._constants)
        self._calls: Mapping[torch.dtype, Any] = functions("ferrule_delta", _AT, _AT, _AT, _AT, _AT, _INT, _AT)

    def accepts(self, mixed: torch.Tensor) -> bool:
        return mixed.is_cpu and mixed.dtype in self._calls

    def __call__(self, mixed: torch.Tensor, strength: torch.Tensor, width: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Compute a step: mixed [tokens, q and k and v], strength and width [tokens, heads].

        Returns float32 [tokens, heads, values].
        """
        mixed = mixed.contiguous()
        if strength.stride() != width.stride() or width.stride(1) != 1:
            strength, width = strength.contiguous(), width.contiguous()
        y = torch.empty((mixed.shape[0], *self._shape), dtype=torch.float32)
        call, addresses = self._calls[mixed.dtype], (each.data_ptr() for each in (mixed, strength, width))
        call(self._at, _batch(rows), *addresses, width.stride(0), y.data_ptr())
        return y
