"""Matrix products with learned weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_kernels.cpu import dense
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_nn.stored import Stored


class Dense(LinearScheme):
    """Weights [out, in] of the model's type. On a CPU `pack` lays them out anew.

    bfloat16 goes to our own kernel where the processor is one that it was written for, and stays in the same memory.
    Else the CPU's matrix library has them, where it has a form. `matrix` is there after the first. So a weight belongs
    to one layer: only a `Head` that is `tied` shares one, with an embedding that it tells.
    """

    def __init__(self) -> None:
        self.matrix: DenseMatrix | None = None
        self._packed: Packed | None = None

    def pack(self, layer: Any) -> None:
        weight = layer.weight
        if (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and weight.numel()
            and dense.unit() is not None
        ):
            self.matrix = DenseMatrix(weight, layer.bias, takes=True)
            self.nbytes = self.matrix.nbytes
        else:
            self._packed = Packed.of(weight)
            self.nbytes = 0 if self._packed is None else weight.nbytes
        if self.nbytes:
            layer.weight = parameter(0)  # its memory is the packed form's now

    def plain(self, layer: Any) -> torch.Tensor:
        """The weight [out, in], once more as it came. There is none where `matrix` is."""
        weight: torch.Tensor = layer.weight if self._packed is None else self._packed.plain()
        return weight

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """The head's result is float32 where the kernel makes it: its sums are."""
        if self.matrix is not None:
            return self.matrix.multiply(x, torch.float32 if layer.head else torch.bfloat16)
        if self._packed is not None:
            return self._packed.matmul(x, layer.bias)
        return F.linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """y = x Wᵀ + b. `scheme` keeps the weights and multiplies by them: the one seam that quantization replaces.

    On a device with memory of its own weights get theirs when they come (`own`), so that a model whose weights shrink
    as they come never needs room for all of them as they were. The host's memory is taken when it is written anyway.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    parts: Mapping[str, int] = {}
    head = False

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, scheme: LinearScheme | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.scheme: LinearScheme = scheme or Dense()
        self.device = torch.get_default_device()
        with torch.device("meta") if waits(self.device) else nullcontext():
            self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self._is_quantized = self._is_packed = False
        self.scheme.allocate(self)

    def quantize(self, name: str, method: QuantizationMethod) -> bool:
        """Called when the model is built and its parts have names; whether the method has a scheme for this one."""
        layer = LinearLayer(name, self.in_features, self.out_features, tuple(self.parts), self.head)
        scheme = method.scheme(layer)
        if scheme is not None:
            self.scheme = scheme
            self._is_quantized = True
            scheme.allocate(self)
        return scheme is not None

    def own(self, name: str) -> nn.Parameter:
        """The parameter of that name, with memory."""
        held: nn.Parameter = getattr(self, name)
        if held.is_meta:
            data = torch.empty_like(held.data, device=self.device)
            held = held.over(data) if isinstance(held, Stored) else nn.Parameter(data, requires_grad=False)
            setattr(self, name, held)
        return held

    def filled(self) -> bool:
        """Called when the last of its tensors came; whether it packed them, to hold none longer than it must."""
        if self._is_quantized:
            self.pack()
        return self._is_packed

    @property
    def nbytes(self) -> int:
        """Bytes that are held beside the parameters."""
        return self.scheme.nbytes

    def pack(self) -> None:
        """Called when all weights are there; a second time does nothing. Raises RuntimeError where none came."""
        if any(held.is_meta for held in self.parameters()):
            raise RuntimeError("a layer's weights did not come through ferrule_nn.load_into, which gives them memory")
        if not self._is_packed:
            self.scheme.pack(self)
        self._is_packed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.matmul(self, x)


class MergedLinear(Linear):
    """Several projections of one input in one product. `parts` maps a checkpoint's name for each to its rows."""

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool = False, scheme: LinearScheme | None = None
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, scheme)
        self.parts = dict(parts)


class Packed:
    """A matrix in the layout of oneDNN, the CPU's matrix library: two to three times as fast as one that is not.

    It takes float32, and bfloat16 on processors that our own kernel was not written for.

    Its kernels sum up a row in an order that other rows have no part in; the one exception, a single row of float32, is
    avoided by doubling it. So a token's hidden state has the same bits alone and in a batch.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed | None:
        """None where there is no such form: another device, another type, a torch without the library."""
        library = torch.ops.mkldnn
        if weight.device.type != "cpu" or not weight.numel() or not torch._C._has_mkldnn:
            return None
        if weight.dtype == torch.bfloat16 and library._is_mkldnn_bf16_supported() or weight.dtype == torch.float32:
            return cls(library._reorder_linear_weight(weight.detach(), None))
        return None

    def plain(self) -> torch.Tensor:
        """The matrix [out, in] in the order of torch."""
        return self._matrix.to_dense()

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        alone = x.shape[0] == 1 and x.dtype == torch.float32
        rows = x.expand(2, -1) if alone else x
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._matrix, bias, "none", [], "")
        return y[:1] if alone else y


def waits(device: torch.device) -> bool:
    """Whether weights on that device have no memory before they come."""
    return device.type not in ("cpu", "meta")


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of the default type on the default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
