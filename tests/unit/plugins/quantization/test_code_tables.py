"""Weights of 4 bits in floating point as compressed-tensors has them: what is refused, and devices without kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule_nn import Linear
from ferrule_nn.loading import load_into
from ferrule_plugins.quantization.compressed import CompressedTensors
from ferrule_plugins.quantization.modelopt import ModelOpt
from ferrule_quant.code_tables import CodedScheme
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import FORMATS

CPU = fake_caps()
NAMES = ("nvfp4-compressed", "mxfp4-compressed")


def _tensors(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return FORMATS[name].encode(torch.randn(24, 64, generator=torch.Generator().manual_seed(2)))


def _layer(name: str) -> Linear:
    layer = Linear(64, 24)
    assert layer.quantize("layers.0.mlp.up_proj", CompressedTensors(FORMATS[name].config))
    return layer


@pytest.mark.parametrize("name", NAMES)
def test_devices_without_a_kernel_have_the_same_numbers_as_floats(name: str) -> None:
    layer, (tensors, meant) = _layer(name), _tensors(name)
    for own, tensor in tensors.items():
        layer.get_parameter(own).data.copy_(tensor)
    assert isinstance(layer.scheme, CodedScheme)
    torch.testing.assert_close(layer.scheme.read_codes(layer).widened(torch.float32), meant, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changed", "value", "message"),
    [
        ("mxfp4-compressed", "weight_scale", 255, "not a finite number"),
        ("nvfp4-compressed", "weight_scale", torch.nan, "is NaN"),
        ("nvfp4-compressed", "weight_global_scale", torch.nan, "not a finite number"),
        ("nvfp4-compressed", "weight_global_scale", 0.0, "not a finite number"),
    ],
)
def test_scales_that_are_not_numbers_are_refused(name: str, changed: str, value: Any, message: str) -> None:
    tensors, _ = _tensors(name)
    tensors[changed].view(-1)[0] = value
    model = torch.nn.ModuleDict({"proj": _layer(name)})
    with pytest.raises(CheckpointError, match=message):
        load_into(model, ((f"proj.{own}", tensor) for own, tensor in tensors.items()))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_names_the_tensor(name: str) -> None:
    tensors, _ = _tensors(name)
    tensors["weight_packed"] = tensors["weight_packed"][:, 1:]
    model = torch.nn.ModuleDict({"proj": _layer(name)})
    with pytest.raises(CheckpointError, match="weight_packed"):
        load_into(model, ((f"proj.{own}", tensor) for own, tensor in tensors.items()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("key", "value"), [("group_size", 64), ("strategy", "channel"), ("symmetric", False)])
def test_other_groups_are_refused(name: str, key: str, value: Any) -> None:
    config = FORMATS[name].config
    group = config["config_groups"]["group_0"]
    changed = {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], key: value}}}}
    assert CompressedTensors.refuses(config, CPU, torch.bfloat16) is None
    assert CompressedTensors.refuses(changed, CPU, torch.bfloat16)


def test_inputs_that_are_not_whole_groups_are_refused() -> None:
    layer = Linear(40, 24)
    with pytest.raises(CheckpointError, match="whole number of groups of 16"):
        layer.quantize("layers.0.mlp.up_proj", CompressedTensors(FORMATS["nvfp4-compressed"].config))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"quant_algo": "NVFP4_SVD"}, "'NVFP4_SVD'"),
        ({"group_size": 64}, "groups of 16 or 32"),
        ({"quant_algo": "MXFP8", "group_size": 16}, "groups of 32"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 12}, "multiple of 8"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT3"}}}, "'INT3'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}, None),
        ({"kv_cache_quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, None),
        ({"kv_cache_quant_algo": "NVFP4"}, "FP8 cache"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme"),
        ({"kv_cache_scheme": "static"}, "kv_cache_scheme"),
    ],
)
def test_what_is_read_of_modelopt(changed: dict[str, Any], reason: str | None) -> None:
    config = {**FORMATS["modelopt-fp4"].config, **changed}
    for each in (config, {"quant_method": "modelopt", "quantization": config}):
        said = ModelOpt.refuses(each, CPU, torch.bfloat16)
        assert said is None if reason is None else said is not None and reason in said


def test_names_with_stars() -> None:
    method = ModelOpt({**FORMATS["modelopt-fp4"].config, "ignore": ["model.layers.0.*", "*.router"]})
    for name, quantized in (("layers.0.up", False), ("layers.10.up", True), ("layers.1.router", False)):
        assert Linear(64, 24).quantize(name, method) is quantized
