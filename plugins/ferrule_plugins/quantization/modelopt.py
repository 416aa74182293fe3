"""NVIDIA's modelopt: e4m3 with a scale for each matrix (FP8), and e2m1 in groups of 16 (NVFP4).

NVFP4 has a `weight` of bytes, of a pair the first in the low half; `weight_scale`, e4m3 for 16 inputs; and
`weight_scale_2`, which multiplies these (https://github.com/NVIDIA/TensorRT-Model-Optimizer, modelopt/torch/export).
Activations are not quantized to 4 bits, and the scales that were measured for them (`input_scale`) are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization.coded import E2M1, Coded, CodedScheme, halves
from ferrule_plugins.quantization.fp8 import Fp8Scheme
from ferrule_plugins.quantization.method import CheckedMethod, check_cache_scheme
from ferrule_plugins.quantization.names import chosen, globbed, listed
from ferrule_plugins.quantization.products import checked

GROUP = 16


class ModelOpt(CheckedMethod):
    formats = ("modelopt", "modelopt_fp4", "nvfp4")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        stated = _stated(config)
        self.left = tuple(globbed(name) for name in listed(stated, "ignore", "exclude_modules"))
        self._four_bits = stated.get("quant_algo") == "NVFP4"

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        stated = _stated(config)
        if stated.get("quant_algo") not in ("FP8", "NVFP4"):
            raise ValueError(f"reads FP8 and NVFP4, and quant_algo is {stated.get('quant_algo')!r}")
        if stated.get("group_size") not in (None, GROUP) and stated["quant_algo"] == "NVFP4":
            raise ValueError(f"reads groups of {GROUP}, and group_size is {stated['group_size']!r}")
        cache = stated.get("kv_cache_quant_algo")
        if cache not in (None, "FP8"):
            raise ValueError(f"reads scales of an FP8 cache, and kv_cache_quant_algo is {cache!r}")
        check_cache_scheme(stated.get("kv_cache_scheme"))

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if chosen(layer, self.left) or layer.head and not self.left:
            return None
        dtype = torch.float32 if layer.head else None
        return NvFp4Scheme(self.shared, dtype) if self._four_bits else Fp8Scheme(self.shared, dtype)


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, which older files have one level down."""
    inner = config.get("quantization")
    return inner if isinstance(inner, Mapping) else config


class NvFp4Scheme(CodedScheme):
    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        if k % GROUP:
            raise CheckpointError(f"{k} inputs of a layer are not a whole number of groups of {GROUP}.")
        weight = checkpoint_parameter(layer, (-1, k // 2), torch.uint8)
        layer.weight_scale = checkpoint_parameter(layer, (-1, k // GROUP), torch.float8_e4m3fn)
        layer.weight_scale_2 = checkpoint_parameter(layer, (-1, 1), torch.float32, broadcast=True)
        layer.weight = weight
        layer.ignored_tensors = (*layer.ignored_tensors, "input_scale")

    def coded(self, layer: Any) -> Coded:
        scales = checked(layer.weight_scale.detach()).float() * layer.weight_scale_2.detach()
        return Coded(halves(layer.weight.detach()), E2M1, scales, GROUP)
