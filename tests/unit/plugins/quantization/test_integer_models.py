"""Whole checkpoints, with experts, in the integer formats: layers beside those of the floats that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.interfaces.plugins import Plugins
from ferrule_testkit.checkpoints import tiny_checkpoint
from tests.unit.plugins.quantization.loading import load_folder
from tests.unit.plugins.quantization.packers import Numbers, Tensors, awq_gemv, drawn, gptq

Encode = Callable[[Numbers], Tensors]
_GPTQ = {"quant_method": "gptq", "bits": 3, "group_size": 16, "sym": False, "desc_act": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
_APART = {**_GPTQ, "desc_act": False, "dynamic": {r"-:.*\.(k|up)_proj": {}}}
CASES: Mapping[str, tuple[dict[str, Any], int, int, bool, Encode]] = {
    "apart": (_APART, 3, 16, False, lambda given: gptq(given, 3)),
    "gptq": (_GPTQ, 3, 16, True, lambda given: gptq(given, 3)),
    "awq": (_AWQ, 4, 32, False, lambda given: awq_gemv(given, 32)),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("experts") / "made")


@pytest.mark.parametrize("name", ["gptq", "awq", "hqq", "hqq-far", "aqlm", "squeezellm"])
def test_random_weights(experts: Path, plugins: Plugins, name: str) -> None:
    """Fill, with `--load-format dummy` and no checkpoint, whatever parameters a format has."""
    configs = {key: config for key, (config, *_) in CASES.items()}
    for axis, key in enumerate(("hqq-far", "hqq")):
        group = {"weight_quant_params": {"nbits": 4, "group_size": 16, "axis": axis}}
        configs[key] = {"quant_method": "hqq", "quant_config": group, "skip_modules": ["lm_head"]}
    sizes = {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 1, "nbits_per_codebook": 8}
    configs["squeezellm"] = {"quant_method": "squeezellm", "wbits": 4}
    configs["aqlm"] = {"quant_method": "aqlm", **sizes}
    overrides = {"quantization_config": configs[name]}
    loaded = load_folder(experts, plugins, hf_overrides=overrides, load_format="dummy")
    hidden = torch.randn(2, loaded.info.hidden_size, generator=torch.Generator().manual_seed(1))
    assert loaded.model.layers[1].mlp(hidden).isfinite().all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_experts(experts: Path, plugins: Plugins, tmp_path: Path, name: str) -> None:
    config, bits, group, shuffled, encode = CASES[name]
    floats, written = load_file(experts / "model.safetensors"), {}
    for number, (key, tensor) in enumerate(sorted(floats.items())):
        if not key.endswith("_proj.weight") or name == "apart" and key.endswith(("k_proj.weight", "up_proj.weight")):
            written[key] = tensor
            continue
        given = drawn(*tensor.shape, bits, group, seed=number)
        index = drawn(1, tensor.shape[1], bits, group, seed=0, shuffled=shuffled).index  # of what shares its inputs
        given = Numbers(given.numbers, given.zeros, given.scales / 20, index)
        floats[key] = given.meant.contiguous()
        ends = encode(given).items()
        written.update({f"{key.removesuffix('weight')}{end}": each.contiguous() for end, each in ends})
    folders = [tmp_path / "floats", tmp_path / "written"]
    for folder, tensors in zip(folders, (floats, written), strict=True):
        shutil.copytree(experts, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((experts / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))
    plain, quantized = (load_folder(folder, plugins) for folder in folders)
    assert quantized.info.quantization == config["quant_method"]
    assert load_folder(folders[1], plugins, quantization="moe_wna16").info.quantization == "moe_wna16"
    x = torch.randn(5, plain.info.hidden_size, generator=torch.Generator().manual_seed(1))
    for part in ("mlp", "self_attn.qkv_proj"):
        expected, found = (loaded.model.layers[1].get_submodule(part)(x) for loaded in (plain, quantized))  # type: ignore[attr-defined]
        assert (found - expected).norm() < 0.01 * expected.norm()
