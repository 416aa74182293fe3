"""Weights of 8 bits in floating point (e4m3), as checkpoints have them, or made from float ones.

Formats: blocks with a scale each (`weight_block_size`, 128 x 128 in DeepSeek-V3 and what follows it,
https://arxiv.org/abs/2412.19437; with ``scale_fmt`` ue8m0 the scales are powers of two, and may be kept as e8m0), one
scale for each matrix, and one for each output channel (``fbgemm_fp8``).
Activations are quantized as they come, with a scale for each row, or for each 128 inputs of a row beside blocks; scales
of activations that a checkpoint measured (`input_scale`) are coarser, and not used. CPUs keep the weights as integers
of 8 bits with a scale for each 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_quant.fp8 import Fp8FromFloats, Fp8Scheme, block_of
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.products import FP8_FORM


class Fp8Method(CheckedMethod):
    formats = ("fp8", "fbgemm_fp8", "ptpc_fp8", "deepseek_v4_fp8")
    left_keys = ("modules_to_not_convert", "ignored_layers")
    from_floats = True

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        block_of(config, "weight_block_size")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"reads e4m3, and fmt is {config['fmt']!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        dtype = torch.float32 if layer.head else None
        if layer.head and not self.config.get("lm_head"):
            return None  # heads stay as they are in these formats
        if not self.config:
            return Fp8FromFloats(FP8_FORM, self.shared, dtype)
        if chosen(layer, self.left):
            return None
        if self.config.get("weight_block_size"):
            return Fp8Scheme(
                self.shared, dtype, scales="weight_scale_inv", block=block_of(self.config, "weight_block_size")
            )
        return Fp8Scheme(self.shared, dtype)
