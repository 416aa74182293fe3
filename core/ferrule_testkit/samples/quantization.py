"""Packed layers of every form, layers in mxfp4, nf4 and of GGUF files, for `ferrule plugins check` and tests alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer
from ferrule_kernels.cpu import dense
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form
from ferrule_plugins.quantization.bitsandbytes import coded_of
from ferrule_plugins.quantization.gguf import form_of
from ferrule_plugins.quantization.packed import FACTORS, WEIGHT, LayerForm, read, stated

_KEPT = {
    "layers.0.mlp.up_proj": LayerForm(Form(8) if dense.unit() is None else None),
    "layers.1.mlp.up_proj": LayerForm(Form(8)),
    "layers.2.mlp.up_proj": LayerForm(Form(4, 32, 2)),
    "layers.3.mlp.up_proj": LayerForm(Form(5, 32)),
    "layers.0.self_attn.qkv_proj": LayerForm(Form(8, digits=2), factors=True),
    "lm_head": LayerForm(Form(8)),
    "embed_tokens.table": LayerForm(Form(4, 32)),
}


def _packed(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make the tensors of a layer. With factors, its scales are ones that bfloat16 cannot hold."""
    forms = read(config)
    kept = forms[layer.name] if layer.name in forms else forms[f"{layer.name}.table"]
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


def _mxfp4(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make groups of 32 weights: the power of two by which the largest is 6 at most, and the nearest codes."""
    groups = weight.float().reshape(len(weight), -1, 32)
    most = groups.abs().amax(-1).clamp(min=2.0**-100)
    powers = (most / 6).log2().ceil()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / powers.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes.to(torch.uint8).reshape(*codes.shape[:-1], 16, 2).unbind(-1)
    return {"blocks": low | high << 4, "scales": (powers + 127).to(torch.uint8)}


_TYPES = {  # with the size of their blocks: layers have numbers and scales then, not blocks of a file
    "IQ4_NL/32": ["layers.0.mlp.up_proj"],
    "Q8_0/32": ["lm_head"],
    "Q5_K/256": ["layers.1.mlp.up_proj"],
    "Q4_K/256": ["layers.2.mlp.up_proj"],
    "Q6_K/256": ["layers.3.mlp.up_proj"],
    "IQ4_XS/256": ["layers.4.mlp.up_proj"],
    "Q4_1/32": ["layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"],
    "Q5_1/32": ["layers.0.mlp.experts.1.down_proj"],
    "Q5_0/32": ["embed_tokens"],
}


def _gguf(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return levelled(
        weight, form_of(next((kind for kind, names in config["types"].items() if layer.name in names), "Q4_1/32"))
    )


def levelled(weight: torch.Tensor, form: Form) -> dict[str, torch.Tensor]:
    """Make the parameters of a layer of a GGUF file: the nearest numbers of each group, by the simplest rules.

    Weights lie between the group's least and largest, around zero for types without offsets, and for codes such that
    the table's largest number is the group's largest.
    """
    parts, count = weight.float().reshape(len(weight), -1, form.group), 1 << form.bits
    table, least = torch.tensor(form.table), parts.amin(2).clamp(max=0)
    if form.offsets:
        scales = (parts.amax(2).clamp(min=0) - least) / (count - 1)
    elif form.table:
        scales = parts.abs().amax(2) / table.max()
    else:  # the side of the largest has one number more
        largest = parts.gather(2, parts.abs().argmax(2, keepdim=True))[..., 0]
        scales = largest / (-count // 2 if form.bits < 8 else 127)
    made = _in_levels("scale", scales, form)
    tiny = made.pop("spread")
    apart = parts / torch.where(tiny == 0, torch.inf, tiny)[..., None]
    if form.offsets:
        made |= _in_levels("offset", least, form)
        apart = (parts - made.pop("spread")[..., None]) / torch.where(tiny == 0, torch.inf, tiny)[..., None]
    if form.table:
        numbers = (apart.unsqueeze(-1) - table).abs().argmin(-1)
    else:
        numbers = apart.round().clamp(form.lowest, form.lowest + count - 1)
    return {"numbers": numbers.to(torch.int8).flatten(1), **made}


def _in_levels(name: str, values: torch.Tensor, form: Form) -> dict[str, torch.Tensor]:
    """Return values [n, groups] as the parameters of that name, with the rounded values as `spread`."""
    if not form.steps:
        floats = values.to(torch.float16 if form.halves else torch.bfloat16).float()
        return {f"{name}s": floats, "spread": floats}
    blocks, most = values.view(len(values), -1, form.block // form.group), 15 if form.steps == 4 else 63
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    floats = (largest / most).half().float()
    steps = (blocks / torch.where(floats == 0, torch.inf, floats)).round().clamp(0 if form.steps == 4 else -most, most)
    return {
        f"{name}s": floats[..., 0],
        f"{name}_steps": steps.flatten(1).to(torch.int8),
        "spread": (steps * floats).flatten(1),
    }


def _bitsandbytes(layer: LinearLayer, weight: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make nf4 parameters as they are once a file's blocks are taken apart; the offset is 0 without nested scales."""
    made = coded_of(weight)
    pairs = made.codes[:, ::2] << 4 | made.codes[:, 1::2]
    return {"weight": pairs, "weight_absmax": made.scales, "weight_quant_state": torch.zeros(len(weight), 1)}


BITSANDBYTES = {
    "config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "encode": _bitsandbytes,
    "sizes": ((64, 64), (224, 96), (512, 256)),
    "error": 0.2,
}


GGUF = {
    "config": {"quant_method": "gguf", "types": _TYPES},
    "encode": _gguf,
    "sizes": ((64, 48), (256, 100), (512, 17), (512, 256), (256, 64)),
}
MXFP4 = {"config": {"quant_method": "mxfp4"}, "encode": _mxfp4}
PACKED = {"config": stated(_KEPT, torch.bfloat16, "int4"), "encode": _packed}
