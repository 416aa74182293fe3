"""The seam between layers and compiled kernels: each function returns the kernel for what a layer computes, or None.

`LayerKernels` are the kernels that a platform has for layers. A layer takes note of them when it is made, and asks
once, when its weights are loaded. The result is None where they do not have the operation, or do not support it for
these sizes or this type. A layer that gets None, or a tensor of another type than its weights, computes with torch,
which is the definition.

No kernel waits for a device, and what it returns is allocated by torch: so a step with them can be recorded as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ferrule.interfaces.adapters import Add
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import StateRows
from ferrule_kernels import moe
from ferrule_kernels.low_rank import LowRank

__all__ = [
    "Arrange",
    "Bank",
    "CachedHeads",
    "Combine",
    "Convolution",
    "Delta",
    "GatedNorm",
    "GroupedExperts",
    "Heads",
    "LayerKernels",
    "Library",
    "Matrix",
    "Norm",
    "OneRow",
    "Route",
    "Rowwise",
    "Selective",
    "activation",
    "current",
    "delta",
    "for_layers",
    "gate",
    "gated_norm",
    "heads",
    "layer_norm",
    "one_row",
    "rms_norm",
    "router",
    "selective",
    "short_conv",
    "using",
    "weights_device",
]


class Norm(Protocol):
    """A norm of rows that have its weights' size and type."""

    @property
    def size(self) -> int: ...

    def accepts(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...

    def after(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + scale * y and its norm."""


class Heads(Protocol):
    """Norms and rotation of queries and keys, in place, where the projection has left them."""

    def accepts(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Normalise and rotate x [tokens, at least query and key heads, dim] in place.

        `rotation` is cos and sin, each [tokens, 1, turned / 2] of x's type.
        """


@runtime_checkable
class CachedHeads(Heads, Protocol):
    """`Heads` that can also write keys and values to the cache, in the same pass."""

    def write(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Finish the queries of x in place, and put keys and values into `cache` at `slots`."""


class Rowwise(Protocol):
    """A function of each row: [rows, size] to [rows, size], or a gate's [rows, 2 * size] to [rows, size]."""

    def accepts(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class GroupedExperts(Protocol):
    """The weighted sum of each token's experts, whose matrices are stacked."""

    def __call__(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        act: str | Callable[[torch.Tensor], torch.Tensor],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        /,
    ) -> torch.Tensor:
        """Compute the sums as `ferrule_kernels.cuda.grouped.experts` does."""


class Convolution(Protocol):
    """A causal convolution of the step's tokens, which leaves each request's last inputs in its slot."""

    def accepts(self, x: torch.Tensor, rows: StateRows, /) -> bool: ...

    def __call__(self, x: torch.Tensor, rows: StateRows, /) -> torch.Tensor: ...


class Selective(Protocol):
    """Mamba 2's scan of the step's tokens, see `ferrule_kernels.cpu.states.Selective`."""

    def accepts(self, mixed: torch.Tensor, /) -> bool: ...

    def __call__(self, mixed: torch.Tensor, width: torch.Tensor, rows: StateRows, /) -> torch.Tensor: ...


class Delta(Protocol):
    """The gated delta rule for the step's tokens, see `ferrule_kernels.cpu.states.Delta`."""

    def accepts(self, mixed: torch.Tensor, /) -> bool: ...

    def __call__(
        self, mixed: torch.Tensor, strength: torch.Tensor, width: torch.Tensor, rows: StateRows, /
    ) -> torch.Tensor: ...


class GatedNorm(Protocol):
    """An RMS norm of each part of float32 rows x [tokens, size], and a factor silu(z), in z's type."""

    def accepts(self, x: torch.Tensor, z: torch.Tensor, /) -> bool: ...

    def __call__(self, x: torch.Tensor, z: torch.Tensor, /) -> torch.Tensor: ...


# Of x [1, in], a weight [out, in] of its type, and a bias: [1, out].
OneRow = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Of router logits [tokens, experts], with a bias for the choice, as `ferrule_kernels.moe.route`.
Route = Callable[[torch.Tensor, moe.Routing, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
# Of ids [tokens, top_k] and the number of experts, as `ferrule_kernels.moe.arrange`.
Arrange = Callable[[torch.Tensor, int], moe.Arranged]
ExpertProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Of rows, weights and places, as `ferrule_kernels.moe.combine`.
Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Matrix(Protocol):
    """Weights [out, in] in the form that a kernel multiplies by."""

    def multiply(self, x: torch.Tensor, dtype: torch.dtype, /) -> torch.Tensor:
        """Map x [tokens, in] to [tokens, out] of `dtype`."""

    def rows(self, ids: torch.Tensor, /) -> torch.Tensor:
        """Return rows [ids, in] of the weights."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return every tensor that is read."""


class Bank(Protocol):
    """Several matrices of one form, by which rows are multiplied at once."""

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor, count: int, shared: bool = False, /) -> torch.Tensor:
        """Multiply the first counts[0] of `count` rows by the first matrix, the next counts[1] by the second, etc.

        With `shared` there is a single row, which stands for all.
        """


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """The kernels that a platform has for layers, and its properties of the memory of weights.

    All of it is optional.
    """

    dtypes: Collection[torch.dtype] = ()  # of weights, that norms and `one_row` support
    acts: Collection[str] = ()  # activations of `gate` and `activation`, as config.json calls them
    rms_norm: Callable[[torch.Tensor, float, float], Norm] | None = None  # weight, eps, offset
    heads: Callable[[tuple[int, int], int, Sequence[Any], int, bool], Heads] | None = None
    gate: Callable[[str, int], Rowwise] | None = None
    layer_norm: Callable[[torch.Tensor, torch.Tensor | None, float], Norm] | None = None  # weight, bias, eps
    activation: Callable[[str, int], Rowwise] | None = None
    route: Route | None = None
    arrange: Arrange | None = None
    combine: Combine | None = None
    experts: GroupedExperts | None = None
    # Of rows [rows, in], stacked matrices [experts, out, in], each row's expert int32 [rows], biases [experts, out].
    expert_product: ExpertProduct | None = None
    short_conv: Callable[[torch.Tensor, torch.Tensor | None, bool], Convolution] | None = None  # weight, bias, silu
    selective: Callable[..., Selective | None] | None = None  # as `selective`
    delta: Callable[..., Delta | None] | None = None  # as `delta`
    gated_norm: Callable[[torch.Tensor, int, bool, float, bool], GatedNorm] | None = None  # as `gated_norm`
    one_row: OneRow | None = None
    # Of a weight and a bias; with the flag in the memory of that weight, whose values are lost. None: not of that type.
    matrix: Callable[[torch.Tensor, torch.Tensor | None, bool], Matrix | None] | None = None
    packed: Callable[[torch.Tensor], Library | None] | None = None
    bank: Callable[[Sequence[Any]], Bank | None] | None = None  # of what schemes have as their `matrix`
    # Of pairs of matrices, what adds to a product as `ferrule_kernels.low_rank.add` does; None: not of their type.
    low_rank: Callable[[LowRank], Add | None] | None = None
    allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None  # memory of weights; None: torch's
    late: bool = False  # memory is taken when it is allocated: weights get theirs when the checkpoint's tensors come
    reads_rows: bool = False  # of packed quantized weights: tables of embeddings can be quantized


class Library(Protocol):
    """Weights [out, in] in the layout of a library of the device."""

    @property
    def matrix(self) -> torch.Tensor: ...

    def plain(self) -> torch.Tensor:
        """Return the weights as they were."""

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Map x [tokens, in] to [tokens, out]."""


_NO_KERNELS, _NO_LAYERS = Kernels(), LayerKernels()
_CURRENT: ContextVar[Kernels] = ContextVar("kernels", default=_NO_KERNELS)


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Let layers that are made inside use these kernels."""
    token = _CURRENT.set(kernels)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Kernels:
    """Return the kernels that a layer made now is to use."""
    return _CURRENT.get()


def for_layers() -> LayerKernels:
    """Return the current kernels for layers; an empty set where the device has none."""
    return current().part(LayerKernels) or _NO_LAYERS


def weights_device(layer: nn.Module) -> torch.device:
    """Return the device of a layer's weights: of the first parameter that packing has not emptied."""
    weights = list(layer.parameters())
    return next((weight.device for weight in weights if weight.numel()), weights[0].device)


def rms_norm(kernels: LayerKernels, weight: torch.Tensor, eps: float, offset: float) -> Norm | None:
    if kernels.rms_norm is None or weight.dtype not in kernels.dtypes:
        return None
    return kernels.rms_norm(weight, eps, offset)


def layer_norm(kernels: LayerKernels, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Norm | None:
    if kernels.layer_norm is None or weight.dtype not in kernels.dtypes:
        return None
    return kernels.layer_norm(weight, bias, eps)


def heads(
    kernels: LayerKernels,
    counts: tuple[int, int],
    dim: int,
    norms: Sequence[Norm | None] | None,
    turned: int,
    interleaved: bool,
) -> Heads | None:
    """Return the kernel for optional norms and rotation of so many query and key heads of size `dim`.

    `turned` is 0 without a rotation.
    """
    given = [norm for norm in norms or () if norm is not None and norm.size == dim]
    if kernels.heads is None or len(given) != len(norms or ()) or not (given or turned):
        return None
    return kernels.heads(counts, dim, given, turned, interleaved)


def one_row(kernels: LayerKernels, weight: torch.Tensor) -> OneRow | None:
    """Return the product of a single row with `weight`, where the device has a faster one than torch."""
    if weight.dtype not in kernels.dtypes or weight.stride(-1) != 1:
        return None
    return kernels.one_row


def gate(kernels: LayerKernels, act: str, size: int) -> Rowwise | None:
    """Return the kernel for act(gate) * up of rows [gate, up] of 2 * size."""
    return kernels.gate(act, size) if kernels.gate is not None and act in kernels.acts else None


def activation(kernels: LayerKernels, act: str, size: int) -> Rowwise | None:
    return kernels.activation(act, size) if kernels.activation is not None and act in kernels.acts else None


def router(kernels: LayerKernels, choice: moe.Routing) -> Route:
    """Return the function that chooses experts by their scores: this device's kernel, or torch's."""
    return moe.route if kernels.route is None or choice.scores == "sparsemixer" else kernels.route


def short_conv(
    kernels: LayerKernels, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> Convolution | None:
    """Return the kernel for a convolution with weight [channels, 1, kernel] and bias [channels]."""
    return None if kernels.short_conv is None else kernels.short_conv(weight, bias, silu)


def selective(
    kernels: LayerKernels,
    a_log: torch.Tensor,
    skip: torch.Tensor,
    bias: torch.Tensor,
    shape: tuple[int, int, int],
    groups: int,
    limits: tuple[float, float],
) -> Selective | None:
    """Return the kernel that `ferrule_kernels.cpu.states.Selective` describes; None for a shape without one."""
    return None if kernels.selective is None else kernels.selective(a_log, skip, bias, shape, groups, limits)


def delta(
    kernels: LayerKernels, a_log: torch.Tensor, bias: torch.Tensor, shape: tuple[int, int, int, int], eps: float
) -> Delta | None:
    """Return the kernel that `ferrule_kernels.cpu.states.Delta` describes; None for a shape without one."""
    return None if kernels.delta is None else kernels.delta(a_log, bias, shape, eps)


def gated_norm(
    kernels: LayerKernels, weight: torch.Tensor, parts: int, repeats: bool, eps: float, gate_first: bool
) -> GatedNorm | None:
    """Return the kernel for a gated norm of rows of `parts` parts.

    Each part has its own piece of the weight or, with `repeats`, all have the same.
    """
    return None if kernels.gated_norm is None else kernels.gated_norm(weight, parts, repeats, eps, gate_first)
