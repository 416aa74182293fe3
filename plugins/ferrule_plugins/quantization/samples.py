"""Packed layers of every form, for `ferrule plugins check` and tests. No server imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer
from ferrule_kernels.cpu import dense
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form
from ferrule_plugins.quantization.packed import FACTORS, WEIGHT, LayerForm, read, stated

_KEPT = {
    "layers.0.mlp.up_proj": LayerForm(Form(8) if dense.unit() is None else None),
    "layers.1.mlp.up_proj": LayerForm(Form(8)),
    "layers.2.mlp.up_proj": LayerForm(Form(4, 32, 2)),
    "layers.3.mlp.up_proj": LayerForm(Form(4, 32)),
    "layers.0.self_attn.qkv_proj": LayerForm(Form(8, digits=2), factors=True),
    "lm_head": LayerForm(Form(8)),
}


def _packed(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a layer. With factors its scales are ones that bfloat16 cannot hold."""
    kept = read(config)[layer.name]
    if kept.form is None:
        return {WEIGHT: DenseMatrix(weight.bfloat16()).packed}
    if not kept.factors:
        return {WEIGHT: PackedMatrix(weight, kept.form, None, Workspace()).packed}
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127.3
    numbers = (weight.float() / scales.clamp(min=1e-9)).round().clamp(-127, 127).to(torch.int8)
    matrix = PackedMatrix(numbers, kept.form, None, Workspace(), scales)
    if matrix.factors is None:
        raise ValueError(f"bfloat16 holds all scales of {layer.name}")
    return {WEIGHT: matrix.packed, FACTORS: matrix.factors}


PACKED = {"config": stated(_KEPT, torch.bfloat16, "int4"), "encode": _packed}
