"""`gguf`: the types of llama.cpp's files, as integers of as many bits with a scale, and an offset, for 32 or 16 inputs.

Every type is kept without loss but for scales and offsets, which are bfloat16: blocks of a file have them in float16 or
as integers. Codes of IQ4_NL, IQ4_XS and MXFP4 stay codes. Q3_K takes 4 bits, and projections of several types that are
one matrix take what the largest does. Activations are quantized to 8 bits for the same groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_kernels.matmul import Form
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.gguf.blocks import BITS, GROUP, TABLES
from ferrule_plugins.quantization.method import CheckedMethod
from ferrule_plugins.quantization.names import listed
from ferrule_plugins.quantization.products import Integers, Quantized, Shared, kept_bits

_SMALL_GROUPS = frozenset(("Q2_K", "Q3_K", "Q6_K"))
_OFFSETS = frozenset(("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"))


def form_of(types: frozenset[str]) -> Form:
    """The form that holds all of these types."""
    group = GROUP if types & _SMALL_GROUPS else 2 * GROUP
    tables = {TABLES.get(kind, ()) for kind in types}
    if len(tables) == 1 and () not in tables:
        return Form(4, group, table=tables.pop())
    return Form(kept_bits(max(BITS[kind] for kind in types), group), group, offsets=bool(types & _OFFSETS))


class GgufMethod(CheckedMethod):
    conformance = "ferrule_plugins.quantization.samples:GGUF"
    formats = ("gguf",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        types = config.get("types")
        if not isinstance(types, Mapping):
            raise CheckpointError("quantization_config does not say of what types the layers of the GGUF file are.")
        self._types = {name: str(kind) for kind in types for name in listed(types, kind)}

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        before = layer.name.rpartition(".")[0]
        parts = [f"{before}.{name}" if before else name for name in layer.projections]
        whole = self._types.get(layer.name)
        types = [whole] if whole else [self._types.get(name) for name in parts]
        if not types or None in types:
            return None
        return GgufScheme(self.shared, form_of(frozenset(map(str, types))), torch.float32 if layer.head else None)


class GgufScheme(Quantized):
    """Parameters `numbers` int8 [n, k]; `scales` and, where the form has them, `offsets` float32 [n, k / 16]."""

    def __init__(self, shared: Shared, form: Form, dtype: torch.dtype | None) -> None:
        super().__init__(shared, dtype)
        self.form = form

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype
        groups = layer.in_features // GROUP
        if layer.in_features % (2 * GROUP):
            raise CheckpointError(f"A quantized layer has {layer.in_features} inputs, which are not whole blocks.")
        numbers = checkpoint_parameter(layer, (-1, layer.in_features), torch.int8)
        scales = checkpoint_parameter(layer, (-1, groups), torch.float32)
        offsets = checkpoint_parameter(layer, (-1, groups), torch.float32) if self.form.offsets else None
        layer.weight, layer.numbers, layer.scales, layer.offsets = None, numbers, scales, offsets

    def weights(self, layer: Any) -> Integers:
        numbers, step = layer.numbers.detach(), self.form.group // GROUP
        scales = layer.scales.detach()[:, ::step].contiguous()
        offsets = layer.offsets.detach()[:, ::step].contiguous() if self.form.offsets else None
        if self.form.table:
            codes = torch.zeros(256, dtype=torch.uint8, device=numbers.device)
            for code, number in enumerate(self.form.table):
                codes[number + 128] = code
            numbers = codes[numbers.int() + 128]
        elif self.form.bits < 8:
            numbers = numbers.add_(1 << (self.form.bits - 1)).view(torch.uint8)  # the parameter is given up anyway
        return Integers(numbers, scales, None, self.form.bits, self.form.group, offsets, table=self.form.table)
