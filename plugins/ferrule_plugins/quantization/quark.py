"""AMD's Quark: e4m3, int8, mxfp4, and 4 bits in groups, as ``export_safetensors`` of amd-quark 0.13 writes them.

    fp8_e4m3, int8   `weight` [n, k]; `weight_scale`, one or [n], or of blocks of 128 x 128
    fp4              `weight` of bytes, of a pair the first in the low half; `weight_scale`, powers of two for 32 inputs
    int4, uint4      words along the outputs, [k, n / 8], in AWQ's order unless `pack_method` is "order"; `weight_scale`
                     [groups, n], `weight_zero_point` in words as the weights

A scheme of all layers is under ``global_quant_config``, those of some layers under ``layer_quant_config``, by their
names, with ``*`` for any characters. Scales of activations that were measured are coarser than those of each row, and
not used. https://quark.docs.amd.com describes the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_quant.float4 import Float4Scheme
from ferrule_quant.fp8 import BLOCK, BLOCKS, Fp8Scheme
from ferrule_quant.groupwise import Grouped, Settings
from ferrule_quant.integers import Int8Scheme
from ferrule_quant.method import CheckedMethod
from ferrule_quant.mixed_projections import side_by_side
from ferrule_quant.names import globbed, listed, means, names_of
from ferrule_quant.packed_words import AWQ_ORDER, unpacked
from ferrule_quant.products import Integers, Shared

_MX_GROUP = 32
_WHOLE = ("per_tensor", "per_channel")
_FEW = ("int4", "uint4")


@dataclass(frozen=True)
class Stored:
    """The format of a layer's weights: `dtype` and `strategy` as Quark names them; `wide` activations stay floats."""

    dtype: str
    strategy: str
    wide: bool
    settings: Settings | None = None  # of 4 bits in groups


def read(name: str, stated: Any) -> Stored | None:
    """Read one scheme of the configuration, None for floats. Raises ValueError with what is not supported."""
    if not isinstance(stated, Mapping):
        raise ValueError(f"finds no object in {name}")
    weight, activations = stated.get("weight"), stated.get("input_tensors")
    if weight is None:
        return None
    if not isinstance(weight, Mapping) or not isinstance(activations, Mapping | None):
        raise ValueError(f"finds no object as 'weight' or 'input_tensors' of {name}")
    dtype, strategy, group = str(weight.get("dtype")), str(weight.get("qscheme")), weight.get("group_size")
    blocks = weight.get("block_size") == [BLOCK, BLOCK]
    if dtype == "fp8_e4m3" and (strategy in _WHOLE or strategy == "per_block" and blocks):
        return Stored(dtype, strategy, activations is None)
    if dtype == "int8" and strategy in _WHOLE and weight.get("symmetric"):
        return Stored(dtype, strategy, activations is None)
    powers = weight.get("scale_format") == "e8m0"
    if dtype == "fp4" and strategy == "per_group" and group == _MX_GROUP and powers:
        return Stored(dtype, strategy, True)
    if dtype in _FEW and strategy == "per_group" and weight.get("zero_point_type", "int32") == "int32":
        return Stored(dtype, strategy, True, Settings.of({"bits": 4, "group_size": group, "sym": dtype == "int4"}))
    raise ValueError(f"does not read {name}: weights of {dtype!r}, {strategy!r}, groups of {group!r}")


class Quark(CheckedMethod):
    conformance = "ferrule_testkit.samples.integers:QUARK"
    formats = ("quark",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.left = tuple(globbed(name) for name in listed(config, "exclude"))
        self._all, self._some = _schemes(config)
        self._order = AWQ_ORDER if _packing(config) == "reorder" else tuple(range(8))

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        _schemes(config)
        if _packing(config) not in ("reorder", "order"):
            raise ValueError(f"does not know the pack_method {_packing(config)!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        dtype = torch.float32 if layer.head else None
        return side_by_side(layer, [self._stored(name) for name in names_of(layer)], lambda own: self._made(own, dtype))

    def _stored(self, name: str) -> Stored | None:
        if any(means(pattern, name) for pattern in self.left):
            return None
        return next((own for pattern, own in self._some.items() if means(pattern, name)), self._all)

    def _made(self, stored: Stored, dtype: torch.dtype | None) -> LinearScheme:
        if stored.settings is not None:
            signed = stored.dtype == "int4"
            return QuarkIntScheme(self.shared, dtype, stored.settings, order=self._order, signed=signed)
        if stored.dtype == "fp4":
            return Float4Scheme(self.shared, dtype, "mxfp4", numbers="weight")
        if stored.dtype == "int8":
            return Int8Scheme(self.shared, dtype, stored.wide)
        return Fp8Scheme(self.shared, dtype, wide=stored.wide, block=BLOCKS if stored.strategy == "per_block" else None)


def _schemes(config: Mapping[str, Any]) -> tuple[Stored | None, dict[str, Stored | None]]:
    """Return the format of all layers, and those of some by pattern. Raises ValueError."""
    some = config.get("layer_quant_config") or {}
    if not isinstance(some, Mapping):
        raise ValueError("reads 'layer_quant_config' as an object")
    if config.get("layer_type_quant_config"):
        raise ValueError("does not read 'layer_type_quant_config'")
    found = {globbed(str(name)): read(str(name), each) for name, each in some.items()}
    return read("global_quant_config", config.get("global_quant_config") or {}), found


def _packing(config: Mapping[str, Any]) -> str:
    export = config.get("export")
    return str(export.get("pack_method", "reorder")) if isinstance(export, Mapping) else "reorder"


class QuarkIntScheme(Grouped):
    """A scheme with parameters `weight`, `weight_scale`, `weight_zero_point`. Numbers of ``int4`` are `signed`."""

    def __init__(
        self, shared: Shared, dtype: torch.dtype | None, settings: Settings, *, order: tuple[int, ...], signed: bool
    ) -> None:
        super().__init__(shared, dtype, settings)
        self._order = order
        self._flip = 8 if signed else 0  # the highest bit, which makes a signed number one from 0 on

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        groups = self.groups(layer)
        layer.ignored_tensors = (*layer.ignored_tensors, "input_scale")
        return {
            "weight": self.along_outputs(layer, layer.in_features),
            "weight_scale": checkpoint_parameter(layer, (groups, -1), torch.float32),
            "weight_zero_point": self.along_outputs(layer, groups),
        }

    def weights(self, layer: Any) -> Integers:
        words = layer.weight.detach(), layer.weight_zero_point.detach()
        numbers, zeros = (unpacked(each, order=self._order).t() ^ self._flip for each in words)
        return self.integers(numbers.contiguous(), zeros, layer.weight_scale.detach().t())
