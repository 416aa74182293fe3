"""Checkpoints in the formats of quantized weights, written from float ones, with what their weights stand for.

`FORMATS` names each with a ``quantization_config`` and an encoder, which makes of a weight [n, k] the tensors that a
checkpoint has for it, by the ends of their names, and the weight that these mean.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferrule_testkit.quantized_bytes import (
    BLOCK,
    GROUP,
    Tensors,
    fp8_blocks,
    fp8_channels,
    fp8_exponents,
    fp8_matrix,
    int8_channels,
    int8_groups,
    int8_zeros,
    mxfp6,
    mxfp8,
)

Encoder = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
# As `weight.quant_map` has them, of bitsandbytes 0.50.
_BNB_TABLES = {
    "nf4": [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    "fp4": [
        *(0.0, 0.00520833, 0.66666669, 1.0, 0.33333334, 0.5, 0.16666667, 0.25),
        *(0.0, -0.00520833, -0.66666669, -1.0, -0.33333334, -0.5, -0.16666667, -0.25),
    ],
}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    """A format of checkpoints. `wide`: activations are not quantized."""

    config: Mapping[str, Any]
    encode: Encoder
    wide: bool = True


def quantized_checkpoint(source: Path, target: Path, name: str) -> dict[str, torch.Tensor]:
    """Write the checkpoint `source` to `target` in a format of `FORMATS`; what its projections mean, by name.

    Matrices whose names end in ``_proj.weight`` are quantized.
    """
    from safetensors.torch import load_file, save_file

    form = FORMATS[name]
    shutil.copytree(source, target)
    written: Tensors = {}
    meant: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            tensors, weight = form.encode(tensor)
            meant[key] = weight.contiguous()
            written.update((key.removesuffix("weight") + end, value.contiguous()) for end, value in tensors.items())
        else:
            written[key] = tensor
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = form.config
    (target / "config.json").write_text(json.dumps(config))
    return meant


# ------------------------------------------------------------------------------------------ encoders


def _four_bits(weight: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers [n, k], zeros [n, groups], both from 0 to 15, scales [n, groups] float16, and the weights that
    they encode.
    """
    parts = weight.float().view(weight.shape[0], -1, GROUP)
    if symmetric:
        scales = (parts.abs().amax(2).clamp(min=1e-6) / 7.5).half()
        zeros = torch.full_like(scales, 8, dtype=torch.int32)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low).clamp(min=1e-6) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15).to(torch.int32)  # 0 less one is not to be stored
    numbers = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.int32)
    meant = (numbers - zeros[..., None]) * scales.float()[..., None]
    return numbers.flatten(1), zeros, scales, meant.flatten(1)


def _words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack 4-bit numbers [rows, numbers] into int32 [rows, words]."""
    cells = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 8)).to(torch.int64)
    cells = cells.view(cells.shape[0], -1, 8)
    words = torch.zeros(cells.shape[:2], dtype=torch.int64)
    for place, number in enumerate(order):
        words |= cells[:, :, number] << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(weight: torch.Tensor, symmetric: bool = True, less: int = 1) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, meant = _four_bits(weight, symmetric)
    tensors = {
        "qweight": _words(numbers).t(),
        "qzeros": _words(zeros.t() - less),
        "scales": scales.t(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, meant


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, meant = _four_bits(weight, symmetric=False)
    packed = _words(numbers.t(), _AWQ_ORDER), _words(zeros.t(), _AWQ_ORDER)
    return {"qweight": packed[0], "qzeros": packed[1], "scales": scales.t()}, meant


def packed(weight: torch.Tensor, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, meant = _four_bits(weight, symmetric)
    tensors = {"weight_packed": _words(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.t()).t()
    return tensors, meant


def float4(weight: torch.Tensor, group: int = GROUP) -> tuple[Tensors, torch.Tensor]:
    """Encode as e2m1, in groups of 32 with powers of two as scales, or in groups of 16 with e4m3 scales, 448 at most,
    and a global scale.
    """
    parts = weight.float().view(len(weight), -1, group)
    most = parts.abs().amax(2).clamp(min=1e-6)
    if group == GROUP:
        exponents = (most / 6).log2().ceil()
        tensors, scales = {"weight_scale": (exponents + 127).to(torch.uint8)}, exponents.exp2()
    else:
        whole = 448 * 6 / weight.float().abs().amax().reshape(1)
        stored = (most / 6 * whole).clamp(min=2**-9).to(torch.float8_e4m3fn)
        tensors, scales = {"weight_scale": stored, "weight_global_scale": whole}, stored.float() / whole
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = ((parts / scales[..., None]).abs()[..., None] - values).abs().argmin(-1)
    meant = values[codes] * scales[..., None] * torch.where(parts < 0, -1.0, 1.0)
    pairs = (codes + 8 * (parts < 0)).to(torch.uint8).flatten(1)
    return {**tensors, "weight_packed": pairs[:, ::2] + 16 * pairs[:, 1::2]}, meant.flatten(1)


def modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, meant = float4(weight, 16)
    whole = 1 / tensors["weight_global_scale"].reshape(())
    named = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"], "weight_scale_2": whole}
    return {**named, "input_scale": torch.tensor(0.5)}, meant


def modelopt_int4(weight: torch.Tensor, smoothed: bool) -> tuple[Tensors, torch.Tensor]:
    """Encode two outputs in a byte; with `smoothed` activations are multiplied by 1 and 2 in turn."""
    factors = 1.0 + torch.arange(weight.shape[1]) % 2 if smoothed else torch.ones(weight.shape[1])
    numbers, _, scales, meant = _four_bits(weight / factors, symmetric=True)
    codes = (numbers ^ 8).to(torch.uint8)
    tensors = {"weight": codes[::2] | codes[1::2] << 4, "weight_scale": scales.float()}
    return {**tensors, **({"pre_quant_scale": factors.bfloat16()} if smoothed else {})}, meant * factors


def bitsandbytes(weight: torch.Tensor, kind: str = "nf4", nested: bool = False) -> tuple[Tensors, torch.Tensor]:
    """Encode blocks of 64 of the whole matrix; with `nested` their scales are bytes, indices in a table of evenly
    spaced values.
    """
    table = torch.tensor(_BNB_TABLES[kind])
    blocks = weight.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1).clamp(min=1e-6)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors: Tensors = {"weight.absmax": absmax, "weight.quant_map": table}
    if nested:
        offset, steps = float(absmax.mean()), torch.linspace(-1, 1, 256)
        rest = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        most = rest.abs().amax(1)
        places = (rest[..., None] / most[:, None, None] - steps).abs().argmin(-1)
        absmax = ((steps[places] * most[:, None]).flatten() + offset)[: len(absmax)]
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": places.flatten()[: len(absmax)].to(torch.uint8)}
        tensors |= {"weight.nested_absmax": most, "weight.nested_quant_map": steps}
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
    meant = (table[codes] * absmax[:, None]).view(weight.shape)
    pairs = codes.flatten().to(torch.uint8)
    tensors["weight"] = (pairs[::2] * 16 + pairs[1::2])[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(
        bytearray(json.dumps(state).encode()), dtype=torch.uint8
    )
    return tensors, meant


def bitsandbytes_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    most = weight.float().abs().amax(1).clamp(min=1e-6)
    numbers = (weight.float() * (127 / most[:, None])).round()
    tensors = {"weight": numbers.to(torch.int8), "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, numbers * most[:, None] / 127


def sparse(weight: torch.Tensor, encode: Encoder | None = None) -> tuple[Tensors, torch.Tensor]:
    """Keep the two largest of four weights, quantized by `encode` if given."""
    places = weight.float().abs().view(-1, 4).argsort(1, descending=True)[:, :2]
    mask = torch.zeros(weight.numel() // 4, 4, dtype=torch.bool).scatter(1, places, True).view(weight.shape)
    tensors, meant = encode(weight * mask) if encode else ({"weight": weight}, weight * mask)
    dense = tensors.pop("weight")
    bits = (mask.view(len(mask), -1, 8) << torch.arange(8)).sum(2).to(torch.uint8)
    kept = dense.view(torch.uint8)[mask].view(dense.dtype) if dense.dtype.itemsize == 1 else dense[mask]
    shape = torch.tensor(weight.shape).reshape(-1, 1)
    return {**tensors, "compressed": kept.view(len(mask), -1), "bitmask": bits, "shape": shape}, meant


def torchao(weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """Encode as int4 (pairs of numbers, with scales and offsets), or as int8 or intx (numbers of 8 and 4 bits), by
    `kind`.
    """
    if kind == "int8":
        tensors, meant = int8_channels(weight)
        made = {"qdata": tensors["weight"], "scale": tensors["weight_scale"]}
        made["zero_point"] = torch.zeros_like(made["scale"], dtype=torch.int8)
    else:
        numbers, zeros, scales, meant = _four_bits(weight, symmetric=False)
        signed, zeros = (numbers - 8).to(torch.int8), (zeros - 8).to(torch.int8)
        made = {"qdata": signed, "scale": scales, "zero_point": zeros}
        if kind == "int4":
            pairs = (signed[:, ::2] & 15) | signed[:, 1::2] << 4
            made = {"qdata": pairs, "scale": scales.t(), "zero_point": (-zeros * scales.float()).t()}
    return {f"_weight_{name}": tensor for name, tensor in made.items()}, meant


def quark(weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """Encode as fp8 with a scale for each channel, as mxfp4, or in 4 bits, unsigned or signed, by `kind`."""
    if kind == "fp8_e4m3":
        tensors, meant = fp8_channels(weight)
        return {**tensors, "weight_scale": tensors["weight_scale"][:, 0]}, meant
    if kind == "fp4":
        tensors, meant = float4(weight)
        return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}, meant
    numbers, zeros, scales, meant = _four_bits(weight, symmetric=kind == "int4")
    flip = 8 if kind == "int4" else 0
    packed = _words(numbers.t() ^ flip, _AWQ_ORDER), _words(zeros.t() ^ flip, _AWQ_ORDER)
    return {"weight": packed[0], "weight_zero_point": packed[1], "weight_scale": scales.t()}, meant


# ------------------------------------------------------------------------------------------ configurations


def _sparse(config: Mapping[str, Any]) -> dict[str, Any]:
    stated = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}
    return {**config, "sparsity_config": stated}


def _torchao(name: str, **values: Any) -> dict[str, Any]:
    stated = {"default": {"_type": name, "_version": 2, "_data": values}}
    return {"quant_method": "torchao", "quant_type": stated, "modules_to_not_convert": None}


def _quark(dtype: str, strategy: str, activations: Any = None, **values: Any) -> dict[str, Any]:
    weights = {"dtype": dtype, "qscheme": strategy, "symmetric": True, "group_size": None, **values}
    schemes = {"global_quant_config": {"weight": weights, "input_tensors": activations}, "layer_quant_config": {}}
    return {"quant_method": "quark", "exclude": ["*lm_head"], "export": {"pack_method": "reorder"}, **schemes}


def _compressed(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    stated = {"format": form, "quantization_status": "compressed", "kv_cache_scheme": None, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **stated, "config_groups": {"group_0": group}}


def _modelopt(algorithm: str, **values: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **values}


def _with_scales(tensors: Tensors, meant: torch.Tensor, change: Any) -> tuple[Tensors, torch.Tensor]:
    return {**tensors, "weight_scale": change(tensors["weight_scale"])}, meant


def _eight_bits(kind: str, strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


def _groups(symmetric: bool) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}


def _floats(strategy: str, size: int) -> dict[str, Any]:
    return {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}

FORMATS: Mapping[str, Format] = {
    "int8": Format(
        _compressed("int-quantized", _eight_bits("int", "channel"), _eight_bits("int", "token", True)),
        int8_channels,
        wide=False,
    ),
    "int8-weights": Format(_compressed("int-quantized", _eight_bits("int", "channel"), None), int8_channels),
    "fp8-channels": Format(
        _compressed("float-quantized", _eight_bits("float", "channel"), _eight_bits("float", "token", True)),
        fp8_channels,
        wide=False,
    ),
    "fp8-compressed-blocks": Format(
        _compressed(
            "float-quantized",
            _eight_bits("float", "block", block_structure=[BLOCK, BLOCK]),
            _eight_bits("float", "group", True, group_size=BLOCK),
        ),
        lambda weight: fp8_blocks(weight, "weight_scale"),
        wide=False,
    ),
    "fp8-blocks": Format({**_FP8, "weight_block_size": [BLOCK, BLOCK]}, fp8_blocks, wide=False),
    "fp8-exponents": Format(
        {**_FP8, "weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0"}, fp8_exponents, wide=False
    ),
    "fp8-matrix": Format({**_FP8, "activation_scheme": "static"}, fp8_matrix, wide=False),
    "fp8-fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8_channels,
        wide=False,
    ),
    "packed": Format(_compressed("pack-quantized", _groups(True), None), packed),
    "packed-zeros": Format(
        _compressed("pack-quantized", _groups(False), None), lambda weight: packed(weight, symmetric=False)
    ),
    "mxfp4-compressed": Format(_compressed("mxfp4-pack-quantized", _floats("group", GROUP), None), float4),
    "mxfp6-compressed": Format(
        _compressed("mxfp6-pack-quantized", {**_floats("group", GROUP), "num_bits": 6}, None), mxfp6
    ),
    "mxfp8-compressed": Format(
        _compressed(
            "mxfp8-quantized",
            _eight_bits("float", "group", group_size=GROUP),
            _eight_bits("float", "group", True, group_size=GROUP),
        ),
        mxfp8,
        wide=False,
    ),
    "int8-groups": Format(
        _compressed("naive-quantized", _eight_bits("int", "group", group_size=GROUP), None), int8_groups
    ),
    "int8-zeros": Format(
        _compressed("int-quantized", {**_eight_bits("int", "channel"), "symmetric": False}, None), int8_zeros
    ),
    "nvfp4-compressed": Format(
        _compressed("nvfp4-pack-quantized", _floats("tensor_group", 16), None), lambda weight: float4(weight, 16)
    ),
    "nvfp4-compressed-activations": Format(
        _compressed("nvfp4-pack-quantized", _floats("tensor_group", 16), _floats("tensor_group", 16)),
        lambda weight: float4(weight, 16),
    ),
    "nf4": Format({**_BNB, "bnb_4bit_quant_type": "nf4"}, bitsandbytes),
    "nf4-nested": Format(
        {**_BNB, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda weight: bitsandbytes(weight, nested=True),
    ),
    "fp4": Format({**_BNB, "bnb_4bit_quant_type": "fp4"}, lambda weight: bitsandbytes(weight, "fp4")),
    "bitsandbytes-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_rows),
    "modelopt-fp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head*"]}, modelopt
    ),
    "modelopt-mxfp8": Format(_modelopt("MXFP8", group_size=GROUP), mxfp8, wide=False),
    "modelopt-blocks": Format(
        _modelopt("fp8_pb_wo"),
        lambda weight: _with_scales(*fp8_blocks(weight, "weight_scale"), lambda scales: scales[:, None, :, None]),
    ),
    "modelopt-int4": Format(_modelopt("W4A16_AWQ", group_size=GROUP), lambda weight: modelopt_int4(weight, True)),
    "modelopt-int4-plain": Format(_modelopt("W4A8_AWQ", group_size=GROUP), lambda weight: modelopt_int4(weight, False)),
    "modelopt-fp8": Format(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        fp8_matrix,
        wide=False,
    ),
    "gptq": Format({**_GPTQ, "sym": True}, gptq),
    "gptq-zeros": Format({**_GPTQ, "sym": False}, lambda weight: gptq(weight, symmetric=False)),
    "gptq-v2": Format(
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, symmetric=False, less=0)
    ),
    "awq": Format(_AWQ, awq),
    "sparse": Format(_sparse({"quant_method": "compressed-tensors", "config_groups": {}}), sparse),
    "sparse-int8": Format(
        _sparse(_compressed("int-quantized", _eight_bits("int", "channel"), None)),
        lambda weight: sparse(weight, int8_channels),
    ),
    "sparse-fp8": Format(
        _sparse(_compressed("float-quantized", _eight_bits("float", "channel"), _eight_bits("float", "token", True))),
        lambda weight: sparse(weight, fp8_channels),
        wide=False,
    ),
    "torchao-int8": Format(_torchao("Int8WeightOnlyConfig"), lambda weight: torchao(weight, "int8")),
    "torchao-intx": Format(
        _torchao(
            "IntxWeightOnlyConfig",
            weight_dtype={"_type": "torch.dtype", "_data": "int4"},
            granularity={"_type": "PerGroup", "_data": {"group_size": GROUP}},
        ),
        lambda weight: torchao(weight, "intx"),
    ),
    "torchao-int4": Format(_torchao("Int4WeightOnlyConfig", group_size=GROUP), lambda weight: torchao(weight, "int4")),
    "quark-fp8": Format(
        _quark("fp8_e4m3", "per_channel", {"dtype": "fp8_e4m3"}), lambda weight: quark(weight, "fp8_e4m3"), wide=False
    ),
    "quark-mxfp4": Format(
        _quark("fp4", "per_group", group_size=GROUP, scale_format="e8m0"), lambda weight: quark(weight, "fp4")
    ),
    "quark-int4": Format(_quark("int4", "per_group", group_size=GROUP), lambda weight: quark(weight, "int4")),
    "quark-uint4": Format(
        _quark("uint4", "per_group", group_size=GROUP, symmetric=False), lambda weight: quark(weight, "uint4")
    ),
}
