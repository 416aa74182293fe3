"""Layers in the formats of integers and tables, for `ferrule plugins check` and tests alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer
from ferrule_plugins.quantization import marlin
from ferrule_quant.packed_words import AWQ_ORDER, per_words

Tensors = dict[str, torch.Tensor]
_GROUP = 32
_WHOLE = ((64, 64), (224, 96), (512, 256))  # inputs and outputs that fill words


def packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack [rows, numbers] into int32 words, as `words.unpacked` reads them."""
    count, across = per_words(bits)
    cells = numbers.to(torch.int64).reshape(len(numbers), -1, count)
    words = torch.zeros((*cells.shape[:2], across), dtype=torch.int64)
    for place in range(count):
        word, shift = divmod(place * bits, 32)
        number = cells[..., order[place] if order else place]
        words[..., word] |= number << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= number >> 32 - shift
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).flatten(1)


def _rounded(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers [n, k], zero points from 1 on and scales [n, groups] that span each group's least to largest."""
    cells, last = weight.float().view(len(weight), -1, group or weight.shape[1]), (1 << bits) - 1
    low, high = cells.amin(2).clamp(max=0), cells.amax(2).clamp(min=0)
    scales = (high - low) / (last - 1)
    steps = scales.clamp(min=1e-9)
    zeros = (-low / steps).round().clamp(0, last - 1) + 1
    numbers = (cells / steps[..., None] + zeros[..., None]).round().clamp(0, last)
    return numbers.flatten(1).to(torch.int32), zeros.to(torch.int32), scales


def _awq(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    numbers, zeros, scales = _rounded(weight, 4, _GROUP)
    words = (packed(values.t().contiguous(), 4, AWQ_ORDER) for values in (numbers, zeros))
    return {**dict(zip(("qweight", "qzeros"), words, strict=True)), "scales": scales.t()}


def _gptq(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    """Make a layer whose last inputs are the first group. The tensor of groups has a row for each projection."""
    numbers, zeros, scales = _rounded(weight.flip(1), 4, _GROUP)
    made = {"qweight": packed(numbers.flip(1), 4).t(), "qzeros": packed(zeros.t() - 1, 4), "scales": scales.t()}
    index = torch.arange(weight.shape[1]).flip(0) // _GROUP
    return {**made, "g_idx": index.int().repeat(len(layer.projections) or 1, 1)}


def _auto_round(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    numbers, zeros, scales = _rounded(weight, 3, _GROUP)
    return {"qweight": packed(numbers, 3).t(), "qzeros": packed(zeros.t().contiguous(), 3), "scales": scales.t()}


def _qqq(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    scales = weight.float().abs().amax(1, keepdim=True) / 7
    numbers = (weight.float() / scales.clamp(min=1e-9)).round().to(torch.int32) & 15
    order = marlin.order_of_tiles(marlin.FOUR, 4, marlin.QQQ_CHANNELS)
    n, k = numbers.shape
    tiles = numbers.t().reshape(k // marlin.TILE, marlin.TILE, n // marlin.TILE, marlin.TILE).transpose(1, 2)
    channels = (scales / 16).t().reshape(-1, len(marlin.CHANNELS))[:, list(marlin.CHANNELS)]
    blocks = tiles.reshape(len(tiles), -1, order.numel())[..., order]
    return {"B": packed(blocks.flatten(1), 4), "s_channel": channels.view(1, -1)}


def _hqq(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    """Make a layer with zero points between the integers."""
    cells = weight.float().view(len(weight), -1, 16)
    low, high = cells.amin(2), cells.amax(2)
    scale = (high - low) / 15
    steps = scale.clamp(min=1e-9)
    zero = -low / steps
    numbers = (cells / steps[..., None] + zero[..., None]).round().clamp(0, 15)
    return {"W_q": numbers.flatten(1).to(torch.uint8), "scale": scale, "zero": zero}


def _squeezellm(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    low, high = weight.float().amin(1, keepdim=True), weight.float().amax(1, keepdim=True)
    table = low + (high - low) * torch.arange(16) / 15
    numbers = (weight.float().unsqueeze(-1) - table.unsqueeze(1)).abs().argmin(-1)
    return {"qweight": packed(numbers, 4).t(), "lookup_table": table}


def _aqlm(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    """Make a layer in which each codebook gives one of a group's eight weights, and zero for the others."""
    scales = weight.float().abs().amax(1, keepdim=True)
    codes = ((weight.float() / scales.clamp(min=1e-9) + 1) * 127).round().to(torch.uint8).view(torch.int8)
    books = torch.eye(8).view(8, 1, 1, 8) * (torch.arange(256) / 127 - 1).view(1, 256, 1, 1)
    return {"codes": codes.view(len(weight), -1, 8), "codebooks": books, "scales": scales.view(-1, 1, 1, 1)}


def _torchao(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    numbers, zeros, scales = _rounded(weight, 4, _GROUP)
    pairs = (numbers ^ 8).to(torch.uint8)
    added = (8 - zeros) * scales
    made = {
        "qdata": (pairs[:, ::2] | pairs[:, 1::2] << 4).view(torch.int8),
        "scale": scales.t(),
        "zero_point": added.t(),
    }
    return {f"_weight_{name}": tensor for name, tensor in made.items()}


def _quark(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    made = _awq(layer, weight, config)
    return {"weight": made["qweight"], "weight_zero_point": made["qzeros"], "weight_scale": made["scales"]}


def _fp_quant(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> Tensors:
    """Make a layer of nvfp4, whose weights are rotated by a permutation of 16 inputs."""
    order = torch.arange(16).roll(5)
    groups = weight.float().view(len(weight), -1, 16)[..., order]
    scales = groups.abs().amax(-1).clamp(min=1e-9) / 6
    whole = 256 / scales.max()
    kept = (scales * whole).to(torch.float8_e4m3fn)
    scaled = groups / (kept.float() / whole).clamp(min=1e-9).unsqueeze(-1)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes.to(torch.uint8).reshape(len(codes), -1, 2).unbind(-1)
    matrix = torch.zeros(16, 16)
    matrix[order, torch.arange(16)] = 1
    return {
        "qweight": low | high << 4,
        "scales": kept.view(torch.uint8),
        "weight_global_scale": whole.view(1),
        "forward_hadamard_matrix": matrix.repeat(len(layer.projections) or 1, 1, 1),
    }


_HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 16, "axis": 1, "channel_wise": True}}
_AQLM = {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 8, "nbits_per_codebook": 8}
GPTQ = {
    "config": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False, "desc_act": True},
    "encode": _gptq,
    "sizes": _WHOLE,
    "error": 0.2,
}
AWQ = {
    "config": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    "encode": _awq,
    "sizes": _WHOLE,
    "error": 0.2,
}
AUTO_ROUND = {
    "config": {"quant_method": "auto-round", "bits": 3, "group_size": _GROUP, "packing_format": "auto_round"},
    "encode": _auto_round,
    "sizes": _WHOLE,
    "error": 0.3,
}
QQQ = {
    "config": {"quant_method": "qqq", "wbits": 4, "group_size": -1, "modules_to_not_convert": ["self_attn"]},
    "encode": _qqq,
    "sizes": ((64, 64), (224, 128), (512, 256)),
    "error": 0.2,
}
HQQ = {
    "config": {"quant_method": "hqq", "quant_config": _HQQ, "skip_modules": []},
    "encode": _hqq,
    "sizes": ((64, 48), (208, 100), (512, 256)),
}
_PAIRS = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": _GROUP}}
TORCHAO = {
    "config": {"quant_method": "torchao", "quant_type": {"default": _PAIRS}},
    "encode": _torchao,
    "sizes": _WHOLE,
    "error": 0.2,
}
_UINT4 = {"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": _GROUP}, "input_tensors": None}
QUARK = {
    "config": {"quant_method": "quark", "global_quant_config": _UINT4, "exclude": ["lm_head"]},
    "encode": _quark,
    "sizes": _WHOLE,
    "error": 0.2,
}
FP_QUANT = {
    "config": {"quant_method": "fp_quant", "forward_dtype": "nvfp4", "hadamard_group_size": 16},
    "encode": _fp_quant,
    "sizes": ((64, 48), (224, 96)),
    "lone_rows": (torch.bfloat16, torch.float32),
    "error": 0.2,
}
_TABLES = ((64, 48), (224, 96))
SQUEEZELLM = {"config": {"quant_method": "squeezellm", "wbits": 4}, "encode": _squeezellm, "sizes": _TABLES}
AQLM = {"config": {"quant_method": "aqlm", **_AQLM}, "encode": _aqlm, "sizes": _TABLES}
