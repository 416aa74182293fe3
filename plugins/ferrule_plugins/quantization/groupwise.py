"""AWQ and GPTQ: weights of few bits in groups of inputs, with scales and zero points.

Both keep words of 32 bits. A weight is (number - zero) * scale.

GPTQ (https://arxiv.org/abs/2210.17323) packs inputs, lowest bits first: eight numbers of 4 bits in a word, or 32 of 3
bits in three words; ``gptq_p`` has planes of bits. Zero points are packed along the outputs, in ``gptq`` less one. With
``desc_act`` a tensor `g_idx` says which group each input belongs to. https://github.com/ModelCloud/GPTQModel documents
``dynamic``, settings that differ between layers. Files in the forms of Marlin and BitBLAS are read by
`ferrule_plugins.quantization.marlin` and `ferrule_plugins.quantization.bitblas`.

AWQ (https://arxiv.org/abs/2306.00978) has these layouts (https://github.com/casper-hansen/AutoAWQ, awq/modules/linear):

    gemm        words along the outputs, in the order 0 2 4 6 1 3 5 7
    gemv        words along the inputs, in order; groups are filled up to whole words
    gemv_fast   words of 16 bits, see `AwqFastScheme`; zero points are floats, times their scale
    marlin      without zero points, in the form of Marlin
    bitblas     with zero points, in the form of BitBLAS
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization import bitblas
from ferrule_plugins.quantization.marlin import AWQ_NAMES, MarlinScheme, SparseMarlinScheme
from ferrule_quant.groupwise import Grouped, Settings
from ferrule_quant.method import CheckedMethod, OneOf
from ferrule_quant.mixed_projections import side_by_side
from ferrule_quant.names import listed, matches, means, names_of, spellings
from ferrule_quant.packed_words import (
    AWQ_ORDER,
    AWQ_ORDER_8,
    check_words,
    unpacked,
    unpacked_planes,
)
from ferrule_quant.products import Integers, Shared, Wide

_GPTQ_BITS = {  # of each checkpoint_format
    "gptq": (2, 3, 4, 8),
    "gptq_v2": (2, 3, 4, 8),
    "gptq_p": (2, 3, 4, 5, 6, 7, 8),
    "marlin": (4,),
    "marlin_24": (4, 8),
    "bitblas": bitblas.BITS,
}
_GPTQ_NAMES = ("gptq", "auto_gptq", "gptq_marlin", "gptq_bitblas", "marlin", "gptq_marlin_24", "bitblas")
_AWQ_FORMATS = ("gemm", "gemv", "gemv_fast", "marlin", "bitblas")
_AWQ_BITS = {**dict.fromkeys((4, 5, 6, 7), AWQ_ORDER), 8: AWQ_ORDER_8}  # of 5 to 7 by AutoRound
_ONLY = "modules_in_block_to_quantize"


class Groupwise(CheckedMethod):
    """The common part of AWQ and GPTQ. The head is not quantized unless the checkpoint says otherwise."""

    left_keys = ("modules_to_not_convert",)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        found = [self.settings(name, layer.head) for name in names_of(layer)]
        return side_by_side(layer, found, lambda own: self.made(own, torch.float32 if layer.head else None))

    def settings(self, name: str, head: bool) -> Settings | None:
        """Return the settings of the layer of that name, or None if it is not quantized."""
        if head and not self.config.get("lm_head") or any(means(pattern, name) for pattern in self.left):
            return None
        return Settings.of(self.config)

    @abstractmethod
    def made(self, settings: Settings, dtype: torch.dtype | None) -> LinearScheme:
        """Make the format's scheme."""

    def bitblas_scheme(self, settings: Settings, dtype: torch.dtype | None, symmetric: bool) -> LinearScheme:
        zeros, bits, group = str(self.config.get(bitblas.ZEROS)), settings.bits, settings.group
        return bitblas.BitblasScheme(self.shared, dtype, bits=bits, group=group, symmetric=symmetric, zeros=zeros)


class Gptq(Groupwise):
    conformance = "ferrule_testkit.samples.integers:GPTQ"
    formats = _GPTQ_NAMES

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._dynamic: Mapping[str, Any] = config.get("dynamic") or {}
        blocks = config.get(_ONLY) or []
        lists = blocks if isinstance(blocks, list) and all(isinstance(each, list) for each in blocks) else [blocks]
        self._only = [name for each in lists for name in listed({_ONLY: each}, _ONLY)]

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        layout, dynamic = _layout(config), config.get("dynamic") or {}
        if layout not in _GPTQ_BITS:
            raise ValueError(f"does not read the checkpoint_format {layout!r}")
        if not isinstance(dynamic, Mapping) or not all(isinstance(each, Mapping | None) for each in dynamic.values()):
            raise ValueError("reads 'dynamic' as an object of objects")
        found = [Settings.of({**config, **(each or {})}, _GPTQ_BITS[layout]) for each in ({}, *dynamic.values())]
        if layout.startswith("marlin") and any(each.ordered for each in found):
            raise ValueError("does not read desc_act=true in the form of Marlin, which has no order")
        for each in found if layout == "bitblas" else ():
            bitblas.check(each.bits, each.symmetric, each.ordered)

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return bitblas.stated(folder) if _layout(config) == "bitblas" else {}

    def settings(self, name: str, head: bool) -> Settings | None:
        stated, named = super().settings(name, head), spellings(name)
        if stated is None or self._only and not head and not any(means(pattern, name) for pattern in self._only):
            return None
        for pattern, changes in self._dynamic.items():
            if not any(matches(pattern.removeprefix("+:").removeprefix("-:"), each) for each in named):
                continue
            return None if pattern.startswith("-:") else Settings.of({**self.config, **(changes or {})})
        return stated

    def made(self, settings: Settings, dtype: torch.dtype | None) -> LinearScheme:
        layout = _layout(self.config)
        if layout == "marlin":
            return MarlinScheme(self.shared, dtype, settings.group)
        if layout == "marlin_24":
            return SparseMarlinScheme(self.shared, dtype, settings.bits, settings.group)
        if layout == "bitblas":
            return self.bitblas_scheme(settings, dtype, settings.symmetric)
        return GptqScheme(self.shared, dtype, settings, less=layout == "gptq", planes=layout == "gptq_p")


def _layout(config: Mapping[str, Any]) -> str:
    """Return the layout of a GPTQ checkpoint's tensors."""
    method = {"marlin": "marlin", "gptq_marlin_24": "marlin_24", "bitblas": "bitblas"}.get(
        str(config.get("quant_method")), "gptq"
    )
    for flag, layout in (("is_marlin_format", "marlin"), ("is_bitblas_format", "bitblas")):
        method = layout if config.get(flag) else method
    return str(config.get("checkpoint_format") or config.get("format") or method)


class Awq(Groupwise):
    conformance = "ferrule_testkit.samples.integers:AWQ"
    formats = ("awq", "awq_marlin", "auto_awq")

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        layout = _version(config)
        if layout not in _AWQ_FORMATS:
            raise ValueError(f"reads AWQ's layouts {', '.join(_AWQ_FORMATS)}, and version is {layout!r}")
        Settings.of(config, tuple(_AWQ_BITS) if layout == "gemm" else (4,))

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return bitblas.stated(folder) if _version(config) == "bitblas" else {}

    def made(self, settings: Settings, dtype: torch.dtype | None) -> LinearScheme:
        layout = _version(self.config)
        if layout == "marlin":
            return MarlinScheme(self.shared, dtype, settings.group, AWQ_NAMES)
        if layout == "bitblas":  # with zero points that are in the middle where weights are symmetric
            return self.bitblas_scheme(settings, dtype, symmetric=False)
        settings = replace(settings, ordered=False)
        if layout == "gemm":
            return AwqScheme(self.shared, dtype, settings, _AWQ_BITS[settings.bits])
        return (AwqVectorScheme if layout == "gemv" else AwqFastScheme)(self.shared, dtype, settings)


def _version(config: Mapping[str, Any]) -> str:
    found = [config.get(key) for key in ("version", "format", "checkpoint_format")]
    return str(next((each for each in found if each), "gemm")).lower()


class Either(OneOf):
    """A name for both methods, by which other engines mean kernels of their own: ``moe_wna16`` and ``ipex``."""

    conformance = "ferrule_testkit.samples.integers:AWQ"
    methods = (Awq, Gptq)
    usual = Gptq
    formats = (*Gptq.formats, *Awq.formats)


class GptqScheme(Grouped):
    def __init__(
        self, shared: Shared, dtype: torch.dtype | None, settings: Settings, less: bool, planes: bool = False
    ) -> None:
        super().__init__(shared, dtype, settings)
        self._less = less  # zero points are written less one
        self._unpack = unpacked_planes if planes else unpacked
        self.per = 32 if planes else self.per

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        groups, inputs = self.groups(layer), layer.in_features
        made: dict[str, torch.nn.Parameter] = {
            "qweight": checkpoint_parameter(layer, (inputs * self.bits // 32, -1), torch.int32),
            "qzeros": self.along_outputs(layer, groups),
            "scales": checkpoint_parameter(layer, (groups, -1), torch.float32),
        }
        if self.ordered:
            made["g_idx"] = self.order(layer)
        return made

    def weights(self, layer: Any) -> Integers | Wide:
        numbers = self._unpack(layer.qweight.detach().t(), self.bits)
        zeros = self._unpack(layer.qzeros.detach(), self.bits).t().to(torch.int16) + self._less
        scales = layer.scales.detach().t()
        return self.ordered_integers(layer, numbers, zeros, scales, layer.g_idx.detach() if self.ordered else None)


class AwqScheme(Grouped):
    """A scheme for the layout "gemm": `order` is that of so many numbers along the outputs."""

    def __init__(
        self, shared: Shared, dtype: torch.dtype | None, settings: Settings, order: tuple[int, ...] = AWQ_ORDER
    ) -> None:
        super().__init__(shared, dtype, settings)
        self._order = order
        self.per = max(self.per, len(order))

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        groups = self.groups(layer)
        return {
            "qweight": self.along_outputs(layer, layer.in_features),
            "qzeros": self.along_outputs(layer, groups),
            "scales": checkpoint_parameter(layer, (groups, -1), torch.float32),
        }

    def weights(self, layer: Any) -> Integers:
        words = layer.qweight.detach(), layer.qzeros.detach()
        numbers, zeros = (unpacked(each, self.bits, self._order).t() for each in words)
        return self.integers(numbers.contiguous(), zeros, layer.scales.detach().t())


class AwqVectorScheme(Grouped):
    """A scheme for the layout "gemv".

    Zero points and scales of a row are filled up, to `_filled_up` words of eight groups.
    """

    def units(self, layer: Any) -> None:
        """Return None: the layer cannot be cut, because its padding is at the end of the whole layer's rows."""

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        words = self._filled_up(layer)
        return {
            "qweight": checkpoint_parameter(layer, (-1, layer.in_features // 8), torch.int32),
            "qzeros": checkpoint_parameter(layer, (-1, words), torch.int32),
            "scales": checkpoint_parameter(layer, (-1, 8 * words), torch.float32),
        }

    def _filled_up(self, layer: Any) -> int:
        """Return how many words a row's zero points take, rounded up to a multiple of 2 or 4 for small groups."""
        times = {64: 2, 32: 4}.get(self.group, 1)
        return -(-self.groups(layer) // (8 * times)) * times

    def weights(self, layer: Any) -> Integers:
        groups = self.groups(layer)
        numbers, zeros = unpacked(layer.qweight.detach()), unpacked(layer.qzeros.detach())[:, :groups]
        return self.integers(numbers, zeros, layer.scales.detach()[:, :groups])


class AwqFastScheme(AwqVectorScheme):
    """A scheme for the layout "gemv_fast".

    Of 32 inputs the numbers 8 a + 2 b + c (a, b < 4; c < 2) stand in the order b, c, a. Four outputs take turns for 64
    inputs each, and four numbers that follow each other are a word of 16 bits. `scales` and `qzeros`, floats that are
    -zero * scale, are [groups, n].
    """

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        check_words((layer.in_features,), 64)
        rows = 8 * self._filled_up(layer)
        return {
            "qweight": checkpoint_parameter(layer, (-1, layer.in_features), torch.int16, count=lambda n: n // 4),
            "scales": checkpoint_parameter(layer, (rows, -1), torch.float32),
            "qzeros": checkpoint_parameter(layer, (rows, -1), torch.float32),
        }

    def weights(self, layer: Any) -> Integers:
        words, groups, inputs = layer.qweight.detach().to(torch.int32), self.groups(layer), layer.in_features
        places = torch.stack([words >> (4 * place) & 15 for place in range(4)], dim=-1)  # [n / 4, k, 4]
        turns = places.view(len(words), inputs // 64, 4, 64).transpose(1, 2).reshape(-1, inputs // 32, 4, 2, 4)
        numbers = turns.permute(0, 1, 4, 2, 3).reshape(-1, inputs).to(torch.uint8)
        scales = layer.scales.detach()[:groups].t()
        zeros = (-layer.qzeros.detach()[:groups].t() / scales).round()
        if not bool(((zeros >= 0) & (zeros <= 16) | (scales == 0)).all()):
            raise CheckpointError("A zero point of the checkpoint's quantized weights is not a number of 4 bits.")
        return self.integers(numbers, zeros.nan_to_num(8.0, 8.0, 8.0).to(torch.int16), scales)
