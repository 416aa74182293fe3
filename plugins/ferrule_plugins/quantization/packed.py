"""Weights that `ferrule pack` wrote in the order in which the CPU's kernels read them, so that loading only reads them.

The ``quantization_config`` of such a folder:

    quant_method   ferrule_packed
    layout         the order of the bytes: one of `LAYOUTS`
    dtype          of activations, and of all weights that are not packed
    method         the quantization that made them, or null
    forms          objects that say how the layers which they name are kept:
                   {"kind": "integers", "bits": 4, "group": 32, "digits": 1, "factors": false, "layers": [...]},
                   and "offsets": true where groups have these, "table": [...] where numbers are codes, "halves": true
                   where scales are float16, "block" and "steps" where they have two levels, "embedding": true as
                   "table" below
                   {"kind": "bfloat16", "table": false, "layers": [...]}

Names are those of the model's own layers, which merge what a checkpoint may hold apart; projections in different forms
are layers within these, such as qkv_proj.v_proj. A layer has one tensor `packed_weight` and, with `factors`,
`packed_factors`. With `table`, or `embedding`, it is the head of a tied model, and the embedding reads its rows there.
A quantized embedding's layer is its `table`, such as embed_tokens.table. A layer that no form names is as in any
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_kernels.cpu import dense, library
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import LANES, LONGEST, PackedMatrix, Workspace
from ferrule_kernels.cpu.packed import LAYOUTS, layout
from ferrule_kernels.cpu.pages import weight_memory
from ferrule_kernels.matmul import Form
from ferrule_nn import CheckpointParameter
from ferrule_quant.mixed_projections import Apart
from ferrule_quant.products import check_scales

METHOD = "ferrule_packed"
WEIGHT, FACTORS = "packed_weight", "packed_factors"  # what a layer's tensors are called
_TYPES = ("bfloat16", "float16", "float32")
_BFLOAT16, _INTEGERS = "bfloat16", "integers"
_AGAIN = "`ferrule pack` makes such a folder anew from the checkpoint that it was made from."


@dataclass(frozen=True)
class LayerForm:
    """The form in which a layer is stored: integers in a `form`, or bfloat16 if that is None."""

    form: Form | None
    factors: bool = False
    table: bool = False

    @classmethod
    def of(cls, matrix: DenseMatrix | PackedMatrix, table: bool = False) -> LayerForm:
        if isinstance(matrix, DenseMatrix):
            return cls(None, table=table)
        return cls(matrix.form, matrix.factors is not None, table)

    def stated(self, layers: Sequence[str]) -> dict[str, Any]:
        """Return the entry of `forms` for these layers."""
        if self.form is None:
            return {"kind": _BFLOAT16, "table": self.table, "layers": list(layers)}
        form = self.form
        numbers: dict[str, Any] = {"bits": form.bits, "group": form.group, "digits": form.digits}
        if form.offsets:
            numbers["offsets"] = True
        if form.table:
            numbers["table"] = list(form.table)
        if form.halves:
            numbers["halves"] = True
        if form.block:
            numbers |= {"block": form.block, "steps": form.steps}
        if self.table:
            numbers["embedding"] = True
        return {"kind": _INTEGERS, **numbers, "factors": self.factors, "layers": list(layers)}


def stated(kept: Mapping[str, LayerForm], dtype: torch.dtype, method: str | None) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model whose layers are stored in these forms."""
    layers: dict[LayerForm, list[str]] = {}
    for name, how in kept.items():
        layers.setdefault(how, []).append(name)
    return {
        "quant_method": METHOD,
        "layout": layout(),
        "dtype": str(dtype).removeprefix("torch."),
        "method": method,
        "forms": [how.stated(names) for how, names in layers.items()],
    }


def read(config: Mapping[str, Any]) -> dict[str, LayerForm]:
    """Return the form of each layer.

    Raises CheckpointError for another layout, and for what `stated` does not write.
    """
    order = config.get("layout")
    if order not in LAYOUTS or isinstance(order, bool):
        known = " and ".join(map(str, LAYOUTS))
        raise CheckpointError(f"The weights are packed in layout {order!r}, and {known} are read here.", _AGAIN)
    if config.get("dtype") not in _TYPES:
        raise CheckpointError(
            f"The weights are packed for the type {config.get('dtype')!r}, which is not one of {', '.join(_TYPES)}.",
            _AGAIN,
        )
    found: dict[str, LayerForm] = {}
    for form in _forms(config):
        try:
            how, layers = _kept(form, config["dtype"]), form["layers"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"quantization_config has a form that is not valid: {form!r:.200}.", _AGAIN) from None
        if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
            raise CheckpointError(f"quantization_config has a form without names of layers: {form!r:.200}.", _AGAIN)
        found.update(dict.fromkeys(layers, how))
    if not found:
        raise CheckpointError("quantization_config names no packed layer.", _AGAIN)
    return found


def _forms(config: Mapping[str, Any]) -> list[Any]:
    forms = config.get("forms")
    return forms if isinstance(forms, list) else []


def _kept(form: Mapping[str, Any], dtype: str) -> LayerForm:
    """Read an entry of `forms`. Raises KeyError, TypeError or ValueError for one that is not valid."""
    if form["kind"] == _BFLOAT16 and dtype == _BFLOAT16:
        return LayerForm(None, table=_flag(form["table"]))
    bits, group, digits = form["bits"], form["group"], form["digits"]
    block, steps = form.get("block", 0), form.get("steps", 0)
    whole = all(type(number) is int for number in (bits, group, digits, block, steps))
    table = form.get("table", [])
    if form["kind"] != _INTEGERS or not whole or digits not in (1, 2) or not all(type(each) is int for each in table):
        raise ValueError
    offsets, halves = (_flag(form.get(name, False)) for name in ("offsets", "halves"))
    found = Form(bits, group, digits, offsets, tuple(table), halves, block, steps)
    if found.problem is not None:
        raise ValueError(found.problem)
    return LayerForm(found, _flag(form["factors"]), _flag(form.get("embedding", False)))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


class FerrulePacked(QuantizationMethod):
    formats = (METHOD,)
    conformance = "ferrule_testkit.samples.quantization:PACKED"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._kept = read(config)
        self._turn = config["layout"] != layout()
        self._workspace = Workspace()

    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        """Return why the weights cannot be used, except for another layout: that is the constructor's to report."""
        if not config:
            return "the weights are not packed: `ferrule pack` writes a folder of such"
        if "host_memory" not in caps.features:
            return "the weights are packed for CPUs: other devices take the checkpoint that they were made from"
        if config.get("layout") not in LAYOUTS or config.get("dtype") not in _TYPES:
            return None
        packed, wanted = config["dtype"], str(dtype).removeprefix("torch.")
        if packed != wanted:
            return f"the weights are packed for {packed}, and {wanted} is computed in here: --dtype {packed}"
        return _missing_kernel(config)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        kept = self._kept.get(layer.name)
        if kept is None:
            return self._apart(layer)
        if kept.table and not layer.head:
            raise CheckpointError(
                f"quantization_config says that the embedding is in {layer.name}, which is not a head."
            )
        return self._packed(kept)

    def embedding(self, layer: LinearLayer) -> LinearScheme | None:
        kept = self._kept.get(f"{layer.name}.table")
        return None if kept is None else self._packed(kept)

    def _apart(self, layer: LinearLayer) -> LinearScheme | None:
        """Return the scheme of projections that are stored in different forms, as layers within the merged one."""
        found = {name: self._kept.get(f"{layer.name}.{name}") for name in layer.projections}
        if not any(found.values()):
            return None
        return Apart({name: self._packed(kept) if kept else None for name, kept in found.items()})

    def _packed(self, kept: LayerForm) -> LinearScheme:
        return PackedScheme(kept, self._workspace, self._turn)


def _missing_kernel(config: Mapping[str, Any]) -> str | None:
    """Return which kernel is missing here, and why, or None."""
    try:
        library.load()
    except library.KernelsUnavailableError as error:
        return f"packed weights need compiled kernels: {error}"
    floats = any(isinstance(form, Mapping) and form.get("kind") == _BFLOAT16 for form in _forms(config))
    if floats and dense.unit() is None:
        return "this processor has none of AMX, AVX-512 and AVX2, which packed bfloat16 weights are multiplied by"
    return None


class PackedScheme(LinearScheme):
    """A scheme for one layer whose matrix is stored as the kernel reads it."""

    def __init__(self, kept: LayerForm, workspace: Workspace, turn: bool) -> None:
        self.kept = kept
        self._turn = turn
        self.matrix: DenseMatrix | PackedMatrix | None = None
        self._workspace = workspace

    def allocate(self, layer: Any) -> None:
        self._given, form = layer.weight.dtype, self.kept.form
        if form is not None and form.widths(layer.in_features)[0] > LONGEST:
            raise CheckpointError(f"A packed layer has groups of more than {LONGEST} inputs, which no kernel takes.")
        allocate_packed(layer, self.kept)

    def pack(self, layer: Any) -> None:
        shape = layer.out_features, layer.in_features
        weight, factors = take_data(layer, WEIGHT), take_data(layer, FACTORS) if self.kept.factors else None
        if factors is not None:
            check_scales(factors)
        if self.kept.form is None:
            self.matrix = DenseMatrix.of_packed(weight, shape, layer.bias, self._turn)
        else:
            form, workspace = self.kept.form, self._workspace
            self.matrix = PackedMatrix.of_packed(weight, factors, shape, form, layer.bias, workspace, self._turn)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return () if self.matrix is None else self.matrix.tensors()

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self.matrix is None:
            raise RuntimeError("a packed layer multiplies once its weights are there")
        return self.matrix.multiply(x, torch.float32 if layer.head else x.dtype)

    def rows(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if self.matrix is None or layer.head and not self.kept.table:
            return None
        if isinstance(self.matrix, DenseMatrix):
            return self.matrix.rows
        return partial(self.matrix.rows, dtype=self._given)


def allocate_packed(layer: Any, kept: LayerForm) -> None:
    """Give a layer the parameters of its packed tensors in place of its weight, in memory such as packing gives."""
    outputs, inputs = layer.out_features, layer.in_features
    if kept.table:
        tied = getattr(layer, "tied", None)
        if tied is None:
            raise CheckpointError("The head was packed as a tied model's, and config.json says that it is not tied.")
        tied.remove_table()
    if kept.form is None:
        data = torch.empty(DenseMatrix.packed_count(outputs, inputs), dtype=torch.bfloat16)
    else:
        data = weight_memory((kept.form.packed_bytes(outputs, inputs),), torch.uint8)
    layer.weight = None
    setattr(layer, WEIGHT, _whole(layer, data))
    if kept.factors:
        setattr(layer, FACTORS, _whole(layer, torch.empty(outputs + -outputs % LANES, dtype=torch.float32)))


def _whole(layer: Any, data: torch.Tensor) -> CheckpointParameter:
    """Make a parameter that is filled by one tensor: those of its projections would be empty."""
    borders = list(_borders(layer.projections.values()))
    return CheckpointParameter(data, 0, {**dict.fromkeys([0, *borders], 0), layer.out_features: data.numel()})


def _borders(rows: Any) -> Iterator[int]:
    border = 0
    for count in rows:
        border += count
        yield border


def take_data(layer: Any, name: str) -> torch.Tensor:
    """Return the parameter's data, and leave the parameter empty."""
    data: torch.Tensor = layer.get_parameter(name).detach()
    setattr(layer, name, torch.nn.Parameter(data.new_empty(0), requires_grad=False))
    return data
