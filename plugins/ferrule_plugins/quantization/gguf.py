"""`gguf`: the types of llama.cpp's files, kept as they are: integers with a scale, and an offset, for 32 or 16 inputs.

Scales and offsets are float16, as in blocks of a file, and those of k-quants have two levels as there: a float for a
block of 256 inputs, times an integer for each group. Codes of IQ4_NL, IQ4_XS and MXFP4 stay codes; scales of MXFP4 are
bfloat16, which holds powers of two. Projections of several types that are one matrix are kept side by side. Activations
are quantized to 8 bits for the same groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_files.gguf.reader import TYPES
from ferrule_kernels.cpu.matmul import PackedMatrix
from ferrule_kernels.matmul import Form, Levels
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.gguf.blocks import BITS, BLOCK, GROUPS, OFFSETS, STEPS, TABLES
from ferrule_quant.method import CheckedMethod
from ferrule_quant.mixed_projections import side_by_side
from ferrule_quant.names import listed, names_of
from ferrule_quant.products import Levelled, Quantized, Shared, check_scales, products_of


def form_of(kind: str) -> Form:
    """Return the form of a type, or of one with a smaller block, such as Q4_K/128.

    Raises CheckpointError for others.
    """
    name, _, block = kind.partition("/")
    if name not in BITS or not (block or "0").isdecimal():
        raise CheckpointError(f"quantization_config: no GGUF file has layers of the type {kind!r:.50}.")
    table, steps = TABLES.get(name, ()), STEPS.get(name, 0)
    form = Form(
        4 if table else BITS[name],
        GROUPS.get(name, 32),
        offsets=name in OFFSETS,
        table=table,
        halves=name != "MXFP4",
        block=int(block or BLOCK) if steps else 0,
        steps=steps,
    )
    if form.problem is not None:
        raise CheckpointError(f"Layers of the type {kind!r:.50} are not read: {form.problem}.")
    return form


class GgufMethod(CheckedMethod):
    conformance = "ferrule_testkit.samples.quantization:GGUF"
    formats = ("gguf",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        types = config.get("types")
        if not isinstance(types, Mapping):
            raise CheckpointError("quantization_config does not say of what types the layers of the GGUF file are.")
        self._types: dict[str, str] = {}
        for kind in types:
            form_of(str(kind))  # raises for one that is not known
            self._types.update(dict.fromkeys(listed(types, kind), str(kind)))

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        whole = self._types.get(layer.name)
        kinds = [whole] if whole else [self._types.get(name) for name in names_of(layer)]
        dtype = torch.float32 if layer.head else None
        return side_by_side(layer, kinds, lambda kind: GgufScheme(self.shared, kind, dtype))

    def embedding(self, layer: LinearLayer) -> LinearScheme | None:
        kind = self._types.get(layer.name)
        return None if kind is None else GgufScheme(self.shared, kind, None)


class GgufScheme(Quantized):
    """A scheme with a parameter `blocks` uint8 [n, bytes], rows as in the file, where the CPU's kernel packs these.

    Else, and for types with the size of their blocks, the parameters are `numbers` int8 [n, k], which are codes where
    the form has a table; `scales`, and `offsets` where the form has them, float32 [n, blocks]. Where groups have steps,
    `scale_steps` and `offset_steps` are int8 [n, groups], and a block is several groups.
    """

    row_parameter = "blocks"

    def __init__(self, shared: Shared, kind: str, dtype: torch.dtype | None) -> None:
        super().__init__(shared, dtype)
        self.form = form_of(kind)
        self._type = next((number for number, each in TYPES.items() if each.name == kind), None)

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, self.form.block or self.form.group

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype
        form, inputs = self.form, layer.in_features
        block = form.block or form.group
        if inputs % block:
            raise CheckpointError(f"A quantized layer has {inputs} inputs, which are not whole blocks.")
        if self._type is not None and products_of(layer).compiled:
            each = TYPES[self._type]
            layer.blocks = checkpoint_parameter(layer, (-1, inputs // each.size * each.num_bytes), torch.uint8)
            layer.weight = None
            return
        self._type = None
        found = {"numbers": checkpoint_parameter(layer, (-1, inputs), torch.int8)}
        for name in ("scale", "offset") if form.offsets else ("scale",):
            found[f"{name}s"] = checkpoint_parameter(layer, (-1, inputs // block), torch.float32)
            if form.steps:
                found[f"{name}_steps"] = checkpoint_parameter(layer, (-1, inputs // form.group), torch.int8)
        layer.weight = None
        for name, parameter in found.items():
            setattr(layer, name, parameter)

    def pack_rows(self, layer: Any, first: int, rows: torch.Tensor) -> bool:
        coming = products_of(layer).coming_rows(self, layer, self.form)
        if coming is not None:
            self._put(coming, first, rows)
        return coming is not None

    def pack(self, layer: Any) -> None:
        if self._type is not None and self.coming is None:
            self.coming = products_of(layer).empty(layer, self.form)
            self._put(self.coming, 0, layer.blocks.detach())
        super().pack(layer)

    def _put(self, coming: PackedMatrix, first: int, rows: torch.Tensor) -> None:
        check_scales(torch.tensor(coming.put_blocks(first, cast(int, self._type), rows)), self.given)

    def weights(self, layer: Any) -> Levelled:
        form, numbers = self.form, layer.numbers.detach()
        if form.table:
            numbers = numbers & 15
        return Levelled(numbers, form, _levels(layer, "scale"), _levels(layer, "offset") if form.offsets else None)

    def rows(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return partial(self.matrix.rows, dtype=self.given) if isinstance(self.matrix, PackedMatrix) else None


def _levels(layer: Any, name: str) -> Levels:
    steps = getattr(layer, f"{name}_steps", None)
    return Levels(getattr(layer, f"{name}s").detach(), None if steps is None else steps.detach())
