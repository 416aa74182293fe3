"""NVIDIA's modelopt, by its `quant_algo`; `weight` is [n, k] unless it says otherwise.

    FP8                        e4m3, one `weight_scale`
    FP8_PER_CHANNEL_PER_TOKEN  e4m3, a scale for each output channel
    FP8_PB_WO                  e4m3, a scale for each block of 128 x 128, of four dimensions
    MXFP8                      e4m3, a byte for 32 inputs, the exponent of their scale
    NVFP4 and its variants     e2m1, of a pair the first in the low half; `weight_scale`, e4m3 for 16 or 32 inputs, and
                               `weight_scale_2`, which multiplies these
    MXFP4, W4A8_MXFP4_FP8      e2m1, and a byte for 32 inputs
    W4A16_AWQ, W4A8_AWQ        integers of 4 bits, two outputs in a byte [n / 2, k], the first in the low half
    W8A16, W8A8_SQ_PER_CHANNEL int8, a scale for each output channel
    MIXED_PRECISION            one of these for each of `quantized_layers`; the others are floats

Layers of AWQ and SmoothQuant may have a `pre_quant_scale`, which multiplies activations. Activations are quantized as
they come, to 8 bits where the algorithm says so for weights of 8 bits, and scales that were measured for them
(`input_scale`) are not used. https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export, version 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_quant.code_tables import E2M1, Coded, CodedScheme, halves
from ferrule_quant.float4 import Float4Scheme
from ferrule_quant.fp8 import BLOCKS, MX, Fp8Scheme
from ferrule_quant.integers import Int8Scheme
from ferrule_quant.method import CheckedMethod, check_cache_scheme
from ferrule_quant.mixed_projections import side_by_side
from ferrule_quant.names import globbed, listed, means, names_of, spellings
from ferrule_quant.packed_words import outputs
from ferrule_quant.products import Integers, Quantized, Shared, checked
from ferrule_quant.scales import Smoothed, check_groups

_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8")
_INT8 = ("W8A16", "W8A8_SQ_PER_CHANNEL")
_INT4 = ("W4A16_AWQ", "INT4_AWQ", "W4A8_AWQ")
_NVFP4 = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_MXFP4 = ("MXFP4", "W4A8_MXFP4_FP8")
_MIXED = "MIXED_PRECISION"
_SMOOTHED = ("NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL", *_INT4)
_PRODUCER = {"name": "modelopt"}
_GROUPS = {  # inputs of a group: the usual number, and all that are read
    **dict.fromkeys(_NVFP4, (16, (16, 32))),
    "W4A8_NVFP4_FP8": (32, (16, 32)),
    **dict.fromkeys((*_MXFP4, "MXFP8"), (32, (32,))),
    **dict.fromkeys(_INT4, (128, tuple(range(8, 4097, 8)))),
}


@dataclass(frozen=True)
class Stored:
    """The format of a layer's weights. `group` counts inputs; 0 is no groups."""

    algorithm: str
    group: int

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Stored:
        """Read the format that a configuration states. Raises ValueError with what is not supported."""
        name = str(stated.get("quant_algo")).upper()
        if name not in (*_FP8, *_INT8, *_INT4, *_NVFP4, *_MXFP4):
            raise ValueError(f"does not read the quant_algo {stated.get('quant_algo')!r:.80}")
        usual, read = _GROUPS.get(name, (0, ()))
        group = stated.get("group_size") or usual
        if read and (type(group) is not int or group not in read):
            sizes = " or ".join(map(str, read)) if len(read) < 3 else "a multiple of 8"
            raise ValueError(
                f"reads groups of {sizes} inputs of {name}, and group_size is {stated['group_size']!r:.80}"
            )
        return cls(name, group if read else 0)


class ModelOpt(CheckedMethod):
    formats = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "nvfp4")
    settings_elsewhere = {"hf_quant_config.json": "modelopt"}  # before ModelOpt wrote them into config.json too

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        stated = _stated(config)
        self.left = tuple(globbed(name) for name in listed(stated, "ignore", "exclude_modules"))
        self._all, self._some = _schemes(stated)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        producer = config.get("producer", _PRODUCER)
        if not isinstance(producer, dict) or producer.get("name") != _PRODUCER["name"]:
            raise ValueError(f"reads what is by ModelOpt, and 'producer' is {producer!r:.80}")
        stated = _stated(config)
        _schemes(stated)
        cache = stated.get("kv_cache_quant_algo")
        if cache not in (None, "FP8"):
            raise ValueError(f"reads scales of an FP8 cache, and kv_cache_quant_algo is {cache!r}")
        check_cache_scheme(stated.get("kv_cache_scheme"))

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if layer.head and not self.left and self._all:
            return None
        dtype = torch.float32 if layer.head else None
        return side_by_side(layer, [self._stored(name) for name in names_of(layer)], lambda own: self._made(own, dtype))

    def _stored(self, name: str) -> Stored | None:
        """Return the format of the layer, or of a module that it is part of; None for floats."""
        if any(means(pattern, name) for pattern in self.left):
            return None
        if self._all is not None:
            return self._all
        for spelled in spellings(name):
            while spelled:
                if spelled in self._some:
                    return self._some[spelled]
                spelled = spelled.rpartition(".")[0]
        return None

    def _made(self, stored: Stored, dtype: torch.dtype | None) -> LinearScheme:
        made = self._plain(stored, dtype)
        return Smoothed(made) if stored.algorithm in _SMOOTHED else made

    def _plain(self, stored: Stored, dtype: torch.dtype | None) -> Quantized:
        name = stored.algorithm
        if name in _FP8:
            block = MX if name == "MXFP8" else BLOCKS if "_PB_" in name else None
            return Fp8Scheme(self.shared, dtype, wide=name == "FP8_PB_WO", block=block)
        if name in _INT8:
            return Int8Scheme(self.shared, dtype, wide=name == "W8A16")
        if name in _INT4:
            return Int4Scheme(self.shared, dtype, stored.group)
        if name in _MXFP4:
            return Float4Scheme(self.shared, dtype, "mxfp4", numbers="weight")
        return NvFp4Scheme(self.shared, dtype, stored.group)


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings, which older files have one level down."""
    inner = config.get("quantization")
    return inner if isinstance(inner, Mapping) else config


def _schemes(stated: Mapping[str, Any]) -> tuple[Stored | None, dict[str, Stored]]:
    """Return the format of all layers, or those of some by their names. Raises ValueError."""
    if str(stated.get("quant_algo")).upper() != _MIXED:
        return Stored.of(stated), {}
    layers = stated.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(each, Mapping) for each in layers.values()):
        raise ValueError(f"finds no 'quantized_layers' with an object for each layer of {_MIXED}")
    return None, {str(name): Stored.of(each) for name, each in layers.items()}


class NvFp4Scheme(CodedScheme):
    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: int) -> None:
        super().__init__(shared, dtype)
        self._group = group

    def units(self, layer: Any) -> tuple[int, int]:
        return 1, self._group

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        check_groups(k, self._group)
        weight = checkpoint_parameter(layer, (-1, k // 2), torch.uint8)
        layer.weight_scale = checkpoint_parameter(layer, (-1, k // self._group), torch.float8_e4m3fn)
        layer.weight_scale_2 = checkpoint_parameter(layer, (-1, 1), torch.float32, broadcast=True)
        layer.weight = weight
        layer.ignored_tensors = (*layer.ignored_tensors, "input_scale")

    def read_codes(self, layer: Any) -> Coded:
        scales = checked(layer.weight_scale.detach()).float() * layer.weight_scale_2.detach()
        return Coded(halves(layer.weight.detach()), E2M1, scales, self._group)


class Int4Scheme(Quantized):
    """A scheme with parameters `weight` uint8 [n / 2, k], numbers from -8 to 7, and `weight_scale` [n, groups]."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: int) -> None:
        super().__init__(shared, dtype, wide=True)
        self._group = group

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        check_groups(k, self._group)
        if any(rows % 2 for rows in outputs(layer)):
            raise CheckpointError("Weights of which two outputs share a byte are of an odd number of outputs.")
        weight = checkpoint_parameter(layer, (-1, k), torch.uint8, count=lambda rows: rows // 2)
        layer.weight_scale = checkpoint_parameter(layer, (-1, k // self._group), torch.float32)
        layer.weight = weight  # `weight_scale_2` is that of activations' type, to which numbers were rounded before
        layer.ignored_tensors = (*layer.ignored_tensors, "input_scale", "weight_scale_2")

    def weights(self, layer: Any) -> Integers:
        pairs = layer.weight.detach()
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1) ^ 8
        return Integers(numbers, layer.weight_scale.detach(), None, 4, self._group)
