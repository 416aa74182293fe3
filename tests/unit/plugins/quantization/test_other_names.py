"""FP-Quant, and names by which other engines call formats that are read: each is a method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.quantization.any_format import AnyFormat
from ferrule_plugins.quantization.fpquant import FpQuant
from ferrule_plugins.quantization.mxfp4 import Mxfp4
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import quantized_checkpoint
from tests.unit.plugins.quantization.loading import load_folder
from tests.unit.plugins.quantization.packers import Tensors, loaded, merged, off

CPU = fake_caps()
DOCUMENTED = (
    *("aqlm", "auto-round", "awq", "awq_marlin", "bitblas", "bitsandbytes"),
    *("compressed-tensors", "deepspeedfp", "experts_int8", "fbgemm_fp8", "fp8", "gguf"),
    *("gptq", "gptq_bitblas", "gptq_marlin", "gptq_marlin_24", "hqq", "ipex"),
    *("marlin", "modelopt", "moe_wna16", "neuron_quant", "nvfp4", "ptpc_fp8"),
    *("qqq", "quark", "squeezellm", "torchao", "tpu_int8", "auto_awq"),
    *("auto_gptq", "fp_quant", "modelopt_fp4", "humming", "inc", "mxfp4"),
    *("gpt_oss_mxfp4", "int8_per_channel_weight_only", "online", "deepseek_v4_fp8"),
    *("modelopt_mxfp8", "modelopt_mixed", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
    *("nvfp4_per_token", "mxfp8"),
)


def test_every_documented_name_is_a_method(plugins: Plugins) -> None:
    assert set(DOCUMENTED) <= set(plugins.names("quantization"))


@pytest.mark.parametrize(("form", "alias"), [("gptq", "auto_gptq"), ("awq", "auto_awq"), ("gptq", "gptq_bitblas")])
def test_a_checkpoint_may_have_the_alias(folder: Path, plugins: Plugins, tmp_path: Path, form: str, alias: str) -> None:
    quantized_checkpoint(folder, tmp_path / "made", form)
    file = tmp_path / "made" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["quant_method"] = alias
    file.write_text(json.dumps(config))
    assert load_folder(file.parent, plugins).info.quantization == alias
    assert load_folder(file.parent, plugins, quantization=form).info.quantization == form


@pytest.mark.parametrize("form", ["gptq", "awq", "packed", "fp8-blocks", "modelopt-fp4"])
def test_humming_reads_the_formats_of_others(folder: Path, plugins: Plugins, tmp_path: Path, form: str) -> None:
    quantized_checkpoint(folder, tmp_path / "made", form)
    assert load_folder(tmp_path / "made", plugins, quantization="humming").info.quantization == "humming"


def test_humming_reads_mxfp4_and_refuses_floats() -> None:
    assert AnyFormat.refuses({"quant_method": "gpt_oss_mxfp4"}, CPU, torch.bfloat16) is None
    assert "gpt_oss_mxfp4" in Mxfp4.formats
    assert "not quantized" in (AnyFormat.refuses({}, CPU, torch.bfloat16) or "")
    wrong = {"quant_method": "awq", "bits": 3, "group_size": 32}
    assert "reads 4" in (AnyFormat.refuses(wrong, CPU, torch.bfloat16) or "")


# ---------------------------------------------------------------------------------------- FP-Quant


def _method(**config: Any) -> FpQuant:
    config = {"quant_method": "fp_quant", **config}
    assert FpQuant.refuses(config, CPU, torch.bfloat16) is None
    return FpQuant(config)


def _layer(n: int, k: int, kind: str, size: int, seed: int = 0) -> tuple[Tensors, torch.Tensor]:
    """Return codes and scales of rotated weights, and the weights that multiply activations that are not rotated."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.randint(0, 16, (n, k), generator=draw)
    group = {"mxfp4": 32, "nvfp4": 16}[kind]
    if kind == "mxfp4":
        kept = torch.randint(118, 122, (n, k // group), generator=draw).to(torch.uint8)
        scales = 2.0 ** (kept.float() - 127)
    else:
        eight = (torch.rand((n, k // group), generator=draw) * 0.2 + 0.01).to(torch.float8_e4m3fn)
        kept, scales = eight.view(torch.uint8), eight.float()
    signed = values[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    rotated = signed * scales.repeat_interleave(group, 1) / 3
    matrix = torch.linalg.qr(torch.randn((size, size), generator=draw)).Q  # rotations in general are not symmetric
    weight = torch.einsum("ngi,ji->ngj", rotated.view(n, -1, size), matrix).flatten(1)
    made = {
        "qweight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "scales": kept,
        "weight_global_scale": torch.tensor([3.0]),
        "act_global_scale": torch.tensor([3.0]),
        "forward_hadamard_matrix": matrix,
        "backward_hadamard_matrix": matrix,
        "dqweight": rotated,
    }
    return made, weight


@pytest.mark.parametrize(("kind", "size"), [("mxfp4", 32), ("mxfp4", 128), ("nvfp4", 16), ("nvfp4", 64)])
def test_fp_quant(kind: str, size: int) -> None:
    tensors, meant = _layer(40, 256, kind, size)
    method = _method(forward_dtype=kind, hadamard_group_size=size)
    packed = {name: tensor for name, tensor in tensors.items() if name != "dqweight"}
    assert off(loaded(method, packed, (40, 256)), meant) < 1e-5
    pseudo = _method(forward_dtype=kind, hadamard_group_size=size, pseudoquantization=True)
    floats = {name: tensors[name] for name in ("dqweight", "forward_hadamard_matrix", "weight_global_scale")}
    assert off(loaded(pseudo, floats, (40, 256)), meant) < 1e-5


def test_fp_quant_merges_projections() -> None:
    rows = {"q_proj": 64, "k_proj": 32}
    parts = {name: _layer(count, 64, "mxfp4", 32, seed=count) for name, count in rows.items()}
    tensors = {name: {end: each for end, each in own.items() if end != "dqweight"} for name, (own, _) in parts.items()}
    layer = merged(_method(forward_dtype="mxfp4"), tensors, rows, 64)
    assert off(layer, torch.cat([meant for _, meant in parts.values()])) < 1e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"forward_dtype": "mxfp8"}, "'mxfp8'"),
        ({"store_master_weights": True}, "store_master_weights"),
        ({"hadamard_group_size": 10**9}, "1000000000"),
        ({"hadamard_group_size": [32]}, "[32]"),
        ({"hadamard_group_size": -32}, "-32"),
    ],
)
def test_what_fp_quant_does_not_read_is_told(config: dict[str, Any], said: str) -> None:
    assert said in (FpQuant.refuses({"quant_method": "fp_quant", **config}, CPU, torch.bfloat16) or "")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("forward_hadamard_matrix", torch.eye(16), "of another form"),
        ("forward_hadamard_matrix", torch.eye(32, dtype=torch.int8), "of another form"),
        ("scales", torch.zeros((40, 8)), "the format has torch.uint8"),
        ("scales", torch.full((40, 8), 255, dtype=torch.uint8), "not a finite number"),
        ("weight_global_scale", torch.zeros(1), "not a finite number"),
        ("qweight", torch.zeros((40, 256), dtype=torch.uint8), "has the shape"),
    ],
)
def test_fp_quant_of_another_form_is_told(name: str, value: torch.Tensor, said: str) -> None:
    tensors, _ = _layer(40, 256, "mxfp4", 32)
    del tensors["dqweight"]
    with pytest.raises(CheckpointError, match=said):
        loaded(_method(forward_dtype="mxfp4"), {**tensors, name: value}, (40, 256))
    with pytest.raises(CheckpointError, match="whole number of groups"):
        loaded(_method(forward_dtype="mxfp4"), tensors, (40, 80))
