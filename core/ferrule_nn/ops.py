"""The seam between layers and compiled kernels: each function returns the kernel for what a layer computes, or None.

The device of a layer's weights decides. `family` gives the kernels for that kind of device, those in C++ for a CPU and
those in Triton for a GPU, with the same interface. The result is None on a machine without such kernels, and where they
do not support the operation or the type. Layers ask once, when their weights are loaded. A layer that gets None, or a
tensor of another type than its weights, computes with torch, which is the definition.

No kernel waits for a device, and what it returns is allocated by torch: so a step with them can be recorded as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ferrule.interfaces.model import StateRows
from ferrule_kernels import cuda, moe
from ferrule_kernels.cpu import elementwise, library, routing, states

__all__ = [
    "Arrange",
    "CachedHeads",
    "Combine",
    "Convolution",
    "Delta",
    "Family",
    "GatedNorm",
    "GroupedExperts",
    "Heads",
    "Norm",
    "OneRow",
    "Route",
    "Rowwise",
    "Selective",
    "activation",
    "arranger",
    "combiner",
    "delta",
    "family",
    "fused_acts",
    "gate",
    "gated_norm",
    "grouped_experts",
    "heads",
    "layer_norm",
    "one_row",
    "rms_norm",
    "router",
    "selective",
    "short_conv",
    "weights_device",
]


class Norm(Protocol):
    """A norm of rows that have its weights' size and type."""

    @property
    def size(self) -> int: ...

    def accepts(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...

    def after(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """x + scale * y, and the norm of that."""


class Heads(Protocol):
    """Norms and rotation of queries and keys, in place, where the projection has left them."""

    def accepts(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """x [tokens, at least query and key heads, dim]; cos and sin [tokens, 1, turned / 2], of the same type."""


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
        """As `ferrule_kernels.cuda.grouped.experts`."""


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
    """RMS norm of each part of float32 rows x [tokens, size], and a factor silu(z): of z's type."""

    def accepts(self, x: torch.Tensor, z: torch.Tensor, /) -> bool: ...

    def __call__(self, x: torch.Tensor, z: torch.Tensor, /) -> torch.Tensor: ...


# Of x [1, in], a weight [out, in] of its type, and a bias: [1, out].
OneRow = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Of router logits [tokens, experts], with a bias for the choice, as `ferrule_kernels.moe.route`.
Route = Callable[[torch.Tensor, moe.Routing, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
# Of ids [tokens, top_k] and the number of experts, as `ferrule_kernels.moe.arrange`.
Arrange = Callable[[torch.Tensor, int], moe.Arranged]
# Of rows, weights and places, as `ferrule_kernels.moe.combine`.
Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """The kernels of one kind of device. A kernel that does not exist is None; activations are those in `acts`."""

    dtypes: Collection[torch.dtype]
    acts: Collection[str]  # as config.json calls activations
    rms_norm: Callable[[torch.Tensor, float, float], Norm]  # weight, eps, offset
    heads: Callable[[tuple[int, int], int, Sequence[Any], int, bool], Heads]
    gate: Callable[[str, int], Rowwise]
    layer_norm: Callable[[torch.Tensor, torch.Tensor | None, float], Norm] | None = None  # weight, bias, eps
    activation: Callable[[str, int], Rowwise] | None = None
    route: Route | None = None
    arrange: Arrange | None = None
    combine: Combine | None = None
    experts: GroupedExperts | None = None
    short_conv: Callable[[torch.Tensor, torch.Tensor | None, bool], Convolution] | None = None  # weight, bias, silu
    selective: Callable[..., Selective] | None = None  # as `selective`
    delta: Callable[..., Delta] | None = None  # as `delta`
    gated_norm: Callable[[torch.Tensor, int, bool, float, bool], GatedNorm] | None = None  # as `gated_norm`
    one_row: OneRow | None = None


def family(device: torch.device) -> Family | None:
    """The kernels for tensors on `device`, or None where there are none for it or they cannot run here."""
    if device.type == "cpu":
        return _cpu()
    if device.type == "cuda" and cuda.available() is None:
        return triton_family()
    return None


def _cpu() -> Family | None:
    try:
        library.load()
    except library.KernelsUnavailableError:
        return None
    return Family(
        (torch.float32, torch.bfloat16),
        elementwise.GATES,
        elementwise.RMSNorm,
        elementwise.Heads,
        elementwise.Gate,
        route=routing.route,
        arrange=routing.arrange,
        combine=routing.combine,
        short_conv=states.ShortConv,
        selective=states.Selective,
        delta=states.Delta,
        gated_norm=elementwise.GatedNorm,
    )


@cache
def triton_family() -> Family:
    """Those in Triton, which is imported here and not before."""
    from ferrule_kernels.cuda import gates, grouped, norms, rope_cache, vectors
    from ferrule_kernels.cuda import moe as routers

    return Family(
        (torch.float32, torch.float16, torch.bfloat16),
        gates.GATES,
        norms.RMSNorm,
        rope_cache.CachedHeads,
        gates.Gate,
        norms.LayerNorm,
        gates.Activation,
        route=routers.route,
        experts=grouped.experts,
        one_row=vectors.multiply,
    )


def weights_device(layer: nn.Module) -> torch.device:
    """The device of a layer's weights: of the first parameter that packing has not emptied."""
    weights = list(layer.parameters())
    return next((weight.device for weight in weights if weight.numel()), weights[0].device)


def rms_norm(weight: torch.Tensor, eps: float, offset: float) -> Norm | None:
    kernels = family(weight.device)
    if kernels is None or weight.dtype not in kernels.dtypes:
        return None
    return kernels.rms_norm(weight, eps, offset)


def layer_norm(weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Norm | None:
    kernels = family(weight.device)
    if kernels is None or kernels.layer_norm is None or weight.dtype not in kernels.dtypes:
        return None
    return kernels.layer_norm(weight, bias, eps)


def heads(
    device: torch.device,
    counts: tuple[int, int],
    dim: int,
    norms: Sequence[Norm | None] | None,
    turned: int,
    interleaved: bool,
) -> Heads | None:
    """Norms, if any, and rotation of so many query and key heads of size `dim`; `turned` is 0 without a rotation."""
    given = [norm for norm in norms or () if norm is not None and norm.size == dim]
    kernels = family(device)
    if kernels is None or len(given) != len(norms or ()) or not (given or turned):
        return None
    return kernels.heads(counts, dim, given, turned, interleaved)


def one_row(weight: torch.Tensor) -> OneRow | None:
    """The product of a single row with `weight`, where the device has a faster one than torch."""
    kernels = family(weight.device)
    if kernels is None or weight.dtype not in kernels.dtypes or weight.stride(-1) != 1:
        return None
    return kernels.one_row


def gate(device: torch.device, act: str, size: int) -> Rowwise | None:
    """act(gate) * up of rows [gate, up] of 2 * size."""
    kernels = family(device)
    return kernels.gate(act, size) if kernels is not None and act in kernels.acts else None


def activation(device: torch.device, act: str, size: int) -> Rowwise | None:
    kernels = family(device)
    if kernels is None or kernels.activation is None or act not in kernels.acts:
        return None
    return kernels.activation(act, size)


def router(device: torch.device, choice: moe.Routing) -> Route:
    """The function that chooses experts by their scores: a kernel where this device has one, otherwise torch."""
    kernels = family(device)
    if kernels is None or kernels.route is None or choice.scores == "sparsemixer":
        return moe.route
    return kernels.route


def arranger(device: torch.device) -> Arrange:
    """The function that sorts rows by their expert."""
    kernels = family(device)
    return moe.arrange if kernels is None or kernels.arrange is None else kernels.arrange


def combiner(device: torch.device) -> Combine:
    """The function that sums up the results of each token's experts."""
    kernels = family(device)
    return moe.combine if kernels is None or kernels.combine is None else kernels.combine


def grouped_experts(device: torch.device) -> GroupedExperts | None:
    kernels = family(device)
    return None if kernels is None else kernels.experts


def fused_acts(device: torch.device) -> Collection[str]:
    """Activations that `grouped_experts` computes between its products."""
    kernels = family(device)
    return () if kernels is None else kernels.acts


def short_conv(weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> Convolution | None:
    """With weight [channels, 1, kernel] and bias [channels]."""
    kernels = family(weight.device)
    return None if kernels is None or kernels.short_conv is None else kernels.short_conv(weight, bias, silu)


def selective(
    a_log: torch.Tensor,
    skip: torch.Tensor,
    bias: torch.Tensor,
    shape: tuple[int, int, int],
    groups: int,
    limits: tuple[float, float],
) -> Selective | None:
    """As `ferrule_kernels.cpu.states.Selective`; None for a shape that has no kernel."""
    kernels = family(a_log.device)
    if kernels is None or kernels.selective is None or shape[1] % 2 or shape[2] % states.LANES:
        return None
    return kernels.selective(a_log, skip, bias, shape, groups, limits)


def delta(a_log: torch.Tensor, bias: torch.Tensor, shape: tuple[int, int, int, int], eps: float) -> Delta | None:
    """As `ferrule_kernels.cpu.states.Delta`; None for a shape that has no kernel."""
    kernels = family(a_log.device)
    if kernels is None or kernels.delta is None or any(size % states.LANES for size in shape[2:]):
        return None
    return kernels.delta(a_log, bias, shape, eps)


def gated_norm(weight: torch.Tensor, parts: int, repeats: bool, eps: float, gate_first: bool) -> GatedNorm | None:
    """Of rows with so many parts, each with its own piece of the weight or, with `repeats`, all with the same."""
    kernels = family(weight.device)
    if kernels is None or kernels.gated_norm is None:
        return None
    return kernels.gated_norm(weight, parts, repeats, eps, gate_first)
