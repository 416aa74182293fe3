"""Matrix products with learned weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ferrule.errors import ConfigError
from ferrule.interfaces.adapters import AdapterBank
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix
from ferrule_nn import ops
from ferrule_nn.adapted import adapted
from ferrule_nn.division import ALL, INPUTS, UNDIVIDED, DividedParameter, Division, Split, current_shard, in_order
from ferrule_nn.parameters import CheckpointParameter, parameter


@runtime_checkable
class PacksForCpu(Protocol):
    """A scheme that packs weights for the CPU's compiled kernels, in a form that `ferrule pack` can write."""

    @property
    def matrix(self) -> DenseMatrix | PackedMatrix | None:
        """The packed weights; None before they are packed, and where another form is used."""


class Dense(LinearScheme):
    """Weights [out, in] of the model's type. `pack` lays them out anew where the device has kernels that want it.

    On a CPU bfloat16 weights are packed for our own kernel (`matrix`), in the memory that they have, where the
    processor has the instructions that it needs. Other weights are packed by oneDNN, where it takes their type. Packing
    changes the weight's memory, so a weight belongs to one layer. The exception is a `Head` that is `tied`: the
    embedding that shares its weight reads rows from `matrix` afterwards.
    """

    def __init__(self) -> None:
        self.matrix: ops.Matrix | None = None
        self._packed: ops.Library | None = None
        self._one_row: ops.OneRow | None = None
        self._result = torch.float32  # of the matrix

    def pack(self, layer: Any) -> None:
        self._result = torch.float32 if layer.head else layer.weight.dtype
        weight, kernels = layer.weight, layer.kernels.part(ops.LayerKernels) or ops.LayerKernels()
        if kernels.matrix is not None and weight.numel():
            self.matrix = kernels.matrix(weight, layer.bias, True)
        if self.matrix is None:
            self._packed = kernels.packed(weight) if kernels.packed is not None else None
            self._one_row = ops.one_row(kernels, weight)
        if self.matrix is not None or self._packed is not None:
            layer.weight = parameter(0)  # the packed form has its memory now

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, 1

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        if self.matrix is not None:
            return self.matrix.tensors()
        return () if self._packed is None else (self._packed.matrix,)

    def rows(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return None if self.matrix is None else self.matrix.rows

    def plain(self, layer: Any) -> torch.Tensor:
        """Return the weight [out, in] as the checkpoint has it.

        Not for a layer with a `matrix`, whose weight is gone.
        """
        weight: torch.Tensor = layer.weight if self._packed is None else self._packed.plain()
        return weight

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight. The head's result is float32 where the kernel makes it, as its sums are."""
        if self.matrix is not None:
            return self.matrix.multiply(x, self._result)
        if self._packed is not None:
            return self._packed.matmul(x, layer.bias)
        if self._one_row is not None and x.shape[:-1] == (1,) and x.dtype == layer.weight.dtype:
            return self._one_row(x, layer.weight, layer.bias)
        return F.linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """The layer y = x Wᵀ + b.

    `scheme` keeps the weights and multiplies by them: the one seam that quantization replaces.

    On a GPU parameters are allocated when the checkpoint's tensors come (`materialize`), so that a model that is
    quantized while it is loaded never needs memory for all of its float weights. A CPU's memory is taken when it is
    written, so there parameters are allocated at once.

    `projections` maps the checkpoint's names of merged projections to their rows, see `MergedLinear`. `ignored_tensors`
    are names that a checkpoint may have for this layer, or for its projections, and that are dropped.

    With a `split` each rank has a part of the layer. The sizes given to the constructor are those of the whole layer,
    the attributes those of this rank's part. A layer that is divided by inputs returns the sum of all ranks' products,
    and only the first rank adds the bias: it is zero in others.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    projections: Mapping[str, int] = {}
    ignored_tensors: tuple[str, ...] = ()
    head = False
    of_tokens = True  # rows are those of the step's tokens, in their order; else `adapt` does nothing
    sum_hook: RemovableHandle | None = None  # adds up the products of ranks

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        scheme: LinearScheme | None = None,
        split: Split | None = None,
    ) -> None:
        super().__init__()
        self.shard = current_shard()
        self.division = self._divided(in_features, out_features, split)
        self.scheme: LinearScheme = scheme or Dense()
        self.device, self.dtype = torch.get_default_device(), torch.get_default_dtype()
        self.kernels = ops.current()
        with torch.device("meta") if ops.for_layers().late else nullcontext():
            self.weight = parameter(self.out_features, self.in_features)
        self.bias = parameter(self.out_features) if bias else None
        self.quantized = self.packed = False
        self.scheme.allocate(self)

    def _divided(self, in_features: int, out_features: int, split: Split | None) -> Division | None:
        """Set the sizes of this rank's part. Returns how the whole layer is divided; None where `split` is."""
        self.in_features, self.out_features = in_features, out_features
        if split is None:
            return None
        if split.axis == INPUTS:
            division = split.of(in_features)
            self.in_features = division.shares(self.shard.size)[0]
            if self.shard.size > 1:  # a hook, so that a layer that is not divided has nothing to ask
                add_up = self.shard.collectives.all_reduce
                self.sum_hook = self.register_forward_hook(lambda layer, given, y: add_up(y))
            return division
        division = split.of(*self.projections.values() or (out_features,))
        shares = division.shares(self.shard.size)
        self.sections = division.of_projections(self.projections.values())
        self.projections = {
            name: sum(shares[among]) for name, among in zip(self.projections, self.sections, strict=True)
        }
        self.out_features = sum(shares)
        return division

    def leave_sum(self) -> None:
        """Return this rank's product alone from now on, for a caller that adds up those of all ranks."""
        if self.sum_hook is not None:
            self.sum_hook.remove()

    def quantize(self, name: str, method: QuantizationMethod) -> bool:
        layer = LinearLayer(name, self.in_features, self.out_features, tuple(self.projections), self.head)
        scheme = method.scheme(layer)
        if scheme is not None:
            self.check_units(name, scheme.units(self))
            self.scheme = scheme
            self.quantized = True
            scheme.allocate(self)
        return scheme is not None

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part to the layer's product, by a hook: a layer without adapters has nothing to check."""
        if not self.of_tokens:
            return False
        add = bank.layer(adapted(name, [self], {own: (0, index) for own, index in self.modules_of(name).items()}))
        if add is not None:
            self.register_forward_hook(lambda layer, given, y: add(given[0], y, bank.token_slots), prepend=True)
        return add is not None

    def modules_of(self, name: str) -> dict[str, int | None]:
        """Return the projection that each module of a checkpoint stands for, None for all, if this layer is `name`."""
        beside = name.rpartition(".")[0]
        projections = {f"{beside}.{own}" if beside else own: index for index, own in enumerate(self.projections)}
        return {name: None, **projections}

    def check_units(self, name: str, units: tuple[int, int] | None) -> None:
        """Check that this rank's part is made of whole units of the scheme. Raises ConfigError."""
        if self.division is None or self.shard.size == 1:
            return
        axis = self.division.axis
        shares = self.division.shares(self.shard.size)
        if units is None or any(share % units[axis] for share in shares):
            unit = "" if units is None else f": it has them in groups of {units[axis]}"
            raise ConfigError(
                f"{name}: its quantized {('outputs', 'inputs')[axis]} cannot be divided among {self.shard.size} "
                f"ranks{unit}."
            )

    def part(
        self, own: str, parameter: torch.Tensor, view: torch.Tensor, whole: torch.Tensor, projection: int | None
    ) -> torch.Tensor:
        """Return what this rank has of a checkpoint's tensor for the parameter `own`, or for one projection of it.

        The tensor is for `view`, all of `parameter` or the rows of that projection. Raises ConfigError.
        """
        division, shard = self.division, self.shard
        if division is None or shard.size == 1:
            return whole
        stored = isinstance(parameter, CheckpointParameter)
        rows = parameter.axis if isinstance(parameter, CheckpointParameter) else 0
        if division.axis == INPUTS:
            if own == "bias":
                return torch.zeros_like(whole) if shard.rank else whole
            axes, among = [axis for axis in range(whole.dim()) if axis != rows], ALL
        else:
            axes, among = [rows][: whole.dim() - rows], ALL if projection is None else self.sections[projection]
        for axis in axes:
            if not (stored and whole.shape[axis] in (1, view.shape[axis])):  # one for all, or not divided
                whole = division.part(whole, shard.rank, shard.size, axis=axis, among=among)
        return whole

    def materialize(self, name: str) -> nn.Parameter:
        """Return the parameter of that name, allocated on the layer's device if it was not yet."""
        own = self.get_parameter(name)
        if own.is_meta:
            data = torch.empty_like(own.data, device=self.device)
            own = (
                own.with_data(data) if isinstance(own, CheckpointParameter) else nn.Parameter(data, requires_grad=False)
            )
            setattr(self, name, own)
        return own

    def pack(self) -> None:
        """Pack the weights, once. Raises RuntimeError where parameters were never allocated."""
        if any(own.is_meta for own in self.parameters()):
            raise RuntimeError("a layer's weights were not loaded by ferrule_nn.load_into, which allocates them")
        if not self.packed:
            self.scheme.pack(self)
        self.packed = True

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        """Return the scheme's tensors and the layer's buffers, in which schemes for GPUs register what they pack."""
        return (*self.scheme.packed_tensors(), *self.buffers(recurse=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.matmul(self, x)


class MergedLinear(Linear):
    """Several projections of one input in one product. `projections` maps a checkpoint's name for each to its rows.

    The checkpoint may have a tensor for each projection, beside this layer (`q_proj`, `k_proj`, `v_proj` for
    `qkv_proj`), or one for all of them in this order. With `groups` such a tensor has the rows of each group in turn:
    a share of each projection.
    """

    def __init__(
        self,
        in_features: int,
        projections: Mapping[str, int],
        bias: bool = False,
        scheme: LinearScheme | None = None,
        groups: int = 1,
        split: Split | None = None,
    ) -> None:
        self.projections = self.whole = dict(projections)  # sizes of this rank's part, and those of all
        self.groups = groups
        super().__init__(in_features, sum(projections.values()), bias, scheme, split)

    def in_order(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Return one tensor for all projections in the parameter's order of outputs, which are its dimension `axis`."""
        return in_order(tensor, axis, tuple(self.whole.values()), self.groups)


def division_of(layer: nn.Module, own: str) -> Division | None:
    """Return how ranks divide the parameter `own` of a layer; None where the layer does not say."""
    if isinstance(layer, Linear):
        summed = layer.division is not None and layer.division.axis == INPUTS
        return UNDIVIDED if summed and own == "bias" else layer.division  # one rank adds the bias, and all have it
    parameter = getattr(layer, own, None)
    return parameter.division if isinstance(parameter, DividedParameter) else None
