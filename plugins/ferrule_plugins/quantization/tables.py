"""Weights that are looked up in tables: SqueezeLLM and AQLM. On a CPU they stay codes; on a GPU they are widened.

SqueezeLLM (https://arxiv.org/abs/2306.07629; https://github.com/SqueezeAILab/SqueezeLLM, squeezellm/quant.py) packs
numbers of 3 or 4 bits as GPTQ does, and has a table of floats for each output. To these
`ferrule_plugins.quantization.outliers` are added.

AQLM (https://arxiv.org/abs/2401.06118; https://github.com/Vahe1994/AQLM, inference_lib) has for each group of inputs a
code of each of its codebooks: the sum of what these hold, times a scale for each output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_kernels.cpu.tables import palette_form, unit
from ferrule_kernels.tables import ENTRIES, Additive, AdditiveForm, Palette, PaletteForm
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization import outliers
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.packed_words import check_words, outputs, per_words, unpacked
from ferrule_quant.products import Floats, Quantized, Shared, Tables, Wide, products_of

_WHY = "weights of {} are looked up once, and take 16 bits from there on, or 32 with --dtype float32"
_SIZES = ("in_group_size", "out_group_size", "num_codebooks", "nbits_per_codebook")
_LARGEST = 1 << 12  # of these
_MOST = 1 << 26  # numbers of a layer's codebooks: published ones have 2^20


class SqueezeLlm(CheckedMethod):
    conformance = "ferrule_testkit.samples.integers:SQUEEZELLM"
    formats = ("squeezellm",)
    left_keys = ("modules_to_not_convert",)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        bits = _bits(config)
        if bits not in (3, 4):
            raise ValueError(f"reads 3 and 4 bits, and the checkpoint has {bits!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return None if layer.head or chosen(layer, self.left) else TableScheme(self.shared, self.config)

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return outliers.stated(folder)


def _bits(config: Mapping[str, Any]) -> Any:
    return config.get("wbits", config.get("bits"))


class TableScheme(Quantized):
    """A scheme with parameters `qweight` int32 words [k, n] and `lookup_table` [n, numbers]."""

    def __init__(self, shared: Shared, config: Mapping[str, Any]) -> None:
        super().__init__(shared, wide=True)
        self.bits, self.config = int(_bits(config)), config

    def allocate(self, layer: Any) -> None:
        check_words((layer.in_features,), per_words(self.bits)[0])
        outliers.allocate(layer, self.config)
        self.given = layer.weight.dtype
        self.form: Floats | PaletteForm = Floats(self.given)
        if products_of(layer).compiled and not outliers.expected(self.config):
            self.form = palette_form(self.bits, self.given)
        words = checkpoint_parameter(layer, (layer.in_features * self.bits // 32, -1), torch.int32)
        table = checkpoint_parameter(layer, (-1, 1 << self.bits), torch.float32)
        layer.weight, layer.qweight, layer.lookup_table = None, words, table

    def weights(self, layer: Any) -> Tables | Wide:
        codes, table = unpacked(layer.qweight.detach().t(), self.bits), layer.lookup_table.detach()
        if outliers.expected(self.config):
            floats = table.to(self.given).gather(1, codes.long())
            return Wide(outliers.add(layer, floats), _WHY.format("SqueezeLLM with outliers"))
        return Tables((Palette(codes, table, self.bits),), _WHY.format("SqueezeLLM"))


class Aqlm(CheckedMethod):
    conformance = "ferrule_testkit.samples.integers:AQLM"
    formats = ("aqlm",)
    left_keys = ("linear_weights_not_to_quantize",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.left = tuple(name.removesuffix(".weight") for name in self.left)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        for key in _SIZES:
            value = config.get(key)
            if type(value) is not int or not 1 <= value <= (16 if key == _SIZES[3] else _LARGEST):
                raise ValueError(f"takes a {key} from 1 on, and it is {value!r}")
        inner, outer, books, bits = (config[key] for key in _SIZES)
        if inner * outer * books << bits > _MOST:
            raise ValueError(f"takes codebooks of {_MOST} numbers together, and these have more")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if layer.head or chosen(layer, self.left):
            return None
        return AqlmScheme(self.shared, [int(self.config[key]) for key in _SIZES])


class AqlmScheme(Quantized):
    """A scheme with parameters `codes`, `codebooks` and `scales`.

    `codes` are [n / out, k / in, books], `codebooks` [projections, books, codes, out, in].
    """

    def __init__(self, shared: Shared, sizes: list[int]) -> None:
        super().__init__(shared, wide=True)
        self.inner, self.outer, self.books, self.bits = sizes

    def allocate(self, layer: Any) -> None:
        if layer.in_features % self.inner or any(count % self.outer for count in outputs(layer)):
            raise CheckpointError(f"A layer has no whole number of groups of {self.outer} x {self.inner} weights.")
        self.given = layer.weight.dtype
        self.form: Floats | AdditiveForm = Floats(self.given)
        if self._has_kernel and products_of(layer).compiled:
            item = unit(self.given).itemsize
            self.form = AdditiveForm(self.books, self.bits, self.inner, item, len(outputs(layer)))
        kind = torch.int8 if self.bits <= 8 else torch.int16
        groups = layer.in_features // self.inner
        book = (self.books, 1 << self.bits, self.outer, self.inner)
        layer.codes = checkpoint_parameter(layer, (-1, groups, self.books), kind, count=self._rows)
        layer.codebooks = checkpoint_parameter(layer, (-1, *book), torch.float32, count=lambda _: 1, broadcast=True)
        layer.scales = checkpoint_parameter(layer, (-1, 1, 1, 1), torch.float32, count=self._rows)
        layer.weight = None

    def _rows(self, count: int) -> int:
        """Return how many rows of codes there are for `count` outputs."""
        return count // self.outer

    @property
    def _has_kernel(self) -> bool:
        return self.outer == 1 and self.inner in ENTRIES

    def weights(self, layer: Any) -> Wide | Tables:
        rows = [self._rows(count) for count in outputs(layer)]
        codes, scales = (values.detach().split(rows) for values in (layer.codes, layer.scales))
        parts = list(zip(codes, layer.codebooks.detach(), scales, strict=True))
        why = _WHY.format("AQLM")
        if self._has_kernel:
            return Tables(tuple(self._additive(*part) for part in parts), why)
        return Wide(torch.cat([self._looked_up(*part) for part in parts]), why)

    def _additive(self, codes: torch.Tensor, books: torch.Tensor, scales: torch.Tensor) -> Additive:
        """Return the weights of groups of one output.

        Bits that a code does not have are dropped, as in the format's own programs.
        """
        unsigned = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes
        if self.bits not in (8, 16):
            unsigned = unsigned & ((1 << self.bits) - 1)
        return Additive(unsigned, books.flatten(2), scales.flatten())

    def _looked_up(self, codes: torch.Tensor, books: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the weights that the codes stand for, [n, k]."""
        found = codes.long() & ((1 << self.bits) - 1)
        each = torch.stack([book[found[..., number]] for number, book in enumerate(books)])
        weight = each.sum(0) * scales  # [n / out, k / in, out, in]
        return weight.transpose(1, 2).flatten(2).flatten(0, 1).to(self.given)
