"""Norms, rotations and gates: tensors to the kernels in ``elementwise.cpp``.

Each class is made once, when the weights are there, and holds what never changes as the kernel's own structure: a call
passes addresses and a number of rows, which costs about a microsecond. All raise KernelsUnavailableError when made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ferrule_kernels.cpu import library

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_INT, _FLOAT, _AT = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
# act(x) = x * sigmoid(a * x + b * x**3): a and b.
GATES = {
    "silu": (1.0, 0.0),
    "swish": (1.0, 0.0),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), (1.5957691216057308, 0.07135481282553484)),
}


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _AT), ("size", _INT), ("eps", _FLOAT), ("offset", _FLOAT)]


class _Heads(ctypes.Structure):
    _fields_ = [
        ("q_norm", ctypes.POINTER(_Norm)),
        ("k_norm", ctypes.POINTER(_Norm)),
        *((name, _INT) for name in ("q_heads", "k_heads", "dim", "turned", "interleaved")),
    ]


class _Gate(ctypes.Structure):
    _fields_ = [("size", _INT), ("linear", _FLOAT), ("cubic", _FLOAT)]


class _GatedNorm(ctypes.Structure):
    _fields_ = [
        ("weight", _AT),
        *((name, _INT) for name in ("size", "parts", "repeats", "gate_first")),
        ("eps", _FLOAT),
    ]


def functions(name: str, *arguments: Any) -> dict[torch.dtype, Any]:
    """Return the kernel for each type, whose name is `name` and the type's suffix. Raises KernelsUnavailableError."""
    kernels, found = library.load(), {}
    for dtype, suffix in _SUFFIXES.items():
        found[dtype] = function = getattr(kernels, f"{name}_{suffix}")
        function.argtypes, function.restype = arguments, None
    return found


class RMSNorm:
    """The norm x / rms(x) * (weight + offset), of rows that have the weight's size and type."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        self.dtype, self.size = weight.dtype, weight.numel()
        self.weight = weight.detach()  # its memory must outlive the calls
        self.constants = _Norm(weight.data_ptr(), weight.numel(), eps, offset)
        self._at = ctypes.addressof(self.constants)
        self._call = functions("ferrule_norm", _AT, _AT, _AT, _FLOAT, _AT, _AT, _INT)[weight.dtype]

    def accepts(self, x: torch.Tensor) -> bool:
        return x.is_cpu and x.dtype is self.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._call(self._at, x.data_ptr(), None, 1.0, None, out.data_ptr(), x.numel() // self.constants.size)
        return out

    def after(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + scale * y and its norm."""
        x, y = x.contiguous(), y.contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        rows = x.numel() // self.constants.size
        self._call(self._at, x.data_ptr(), y.data_ptr(), scale, total.data_ptr(), out.data_ptr(), rows)
        return total, out


class Heads:
    """Norms and rotation of queries and keys, in place, where the projection has left them."""

    def __init__(
        self, heads: tuple[int, int], dim: int, norms: Sequence[RMSNorm], turned: int, interleaved: bool
    ) -> None:
        """Prepare the kernels. `norms` are those of queries and of keys, or empty."""
        self._norms = norms  # their memory must outlive the calls
        pointers = [ctypes.pointer(norm.constants) for norm in norms] or 2 * [ctypes.POINTER(_Norm)()]
        self._constants = _Heads(*pointers, *heads, dim, turned, interleaved)
        self._at = ctypes.addressof(self._constants)
        calls = functions("ferrule_heads", _AT, _AT, _INT, _AT, _AT, _INT)
        self._calls = {dtype: calls[dtype] for dtype in calls if all(norm.dtype == dtype for norm in norms)}

    def accepts(self, x: torch.Tensor) -> bool:
        return x.is_cpu and x.dtype in self._calls

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Normalise and rotate x [tokens, at least query and key heads, dim] in place.

        `rotation` is cos and sin, each [tokens, 1, turned / 2] of x's type.
        """
        cos, sin = rotation if rotation is not None else (None, None)
        places = (None, None) if cos is None or sin is None else (cos.data_ptr(), sin.data_ptr())
        self._calls[x.dtype](self._at, x.data_ptr(), x.stride(0), *places, x.shape[0])


class Gate:
    """The product act(gate) * up of rows [gate, up]. Raises KeyError for an activation that is not in `GATES`."""

    def __init__(self, activation: str, size: int) -> None:
        self._constants = _Gate(size, *GATES[activation])
        self._at = ctypes.addressof(self._constants)
        self._size = size
        self._calls = functions("ferrule_gate", _AT, _AT, _AT, _INT)

    def accepts(self, x: torch.Tensor) -> bool:
        return x.is_cpu and x.dtype in self._calls

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows = gate_up.shape[0]
        out = gate_up.new_empty(rows, self._size)
        self._calls[gate_up.dtype](self._at, gate_up.data_ptr(), out.data_ptr(), rows)
        return out


class GatedNorm:
    """RMS norm of each part of float32 rows, and a factor silu(z), which comes first with `gate_first`.

    `weight` is float32: of all parts, or the same for each of them.
    """

    def __init__(self, weight: torch.Tensor, parts: int, repeats: bool, eps: float, gate_first: bool) -> None:
        self._weight = weight.detach().float().contiguous()  # its memory must outlive the calls
        size = weight.numel() if repeats else weight.numel() // parts
        self._constants = _GatedNorm(self._weight.data_ptr(), size, parts, repeats, gate_first, eps)
        self._at = ctypes.addressof(self._constants)
        self._calls = functions("ferrule_gated_norm", _AT, _AT, _AT, _INT, _AT, _INT)

    def accepts(self, x: torch.Tensor, z: torch.Tensor) -> bool:
        return x.is_cpu and x.dtype is torch.float32 and z.dtype in self._calls

    def __call__(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Normalise x, gated by z; both are [tokens, parts * size]. Returns the same shape, of z's type."""
        x, z = x.contiguous(), z if z.stride(1) == 1 else z.contiguous()
        out = torch.empty(z.shape, dtype=z.dtype)
        self._calls[z.dtype](self._at, x.data_ptr(), z.data_ptr(), z.stride(0), out.data_ptr(), z.shape[0])
        return out
