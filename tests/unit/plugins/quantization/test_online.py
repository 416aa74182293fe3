"""Float weights that become others as they load, by vLLM's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.quantization import LinearLayer
from ferrule_nn import Linear
from ferrule_plugins.quantization.online import (
    ByConfig,
    Mxfp4FromFloats,
    Mxfp8,
    NvFp4FromFloats,
    NvFp4PerToken,
    blocks_of,
    in_rows,
    powers,
)
from ferrule_quant.products import Shared
from ferrule_testkit.caps import fake_caps
from tests.unit.plugins.quantization.loading import load_folder

CPU, GPU = fake_caps(), fake_caps("cuda")
# What products of random weights are off by, and bits of a weight.
NAMES = {
    "fp8_per_tensor": (0.01, 8.5),
    "fp8_per_channel": (0.01, 8.5),
    "fp8_per_block": (0.01, 8.5),
    "mxfp8": (0.01, 8.5),
    "mxfp4": (0.15, 4.5),
}


@pytest.mark.parametrize("name", NAMES)
def test_layers_keep_few_bits_and_their_meaning(folder: Path, plugins: Plugins, name: str) -> None:
    loaded, floats = load_folder(folder, plugins, quantization=name), load_folder(folder, plugins)
    assert loaded.info.quantization == name
    layers, count = dict(floats.model.named_modules()), 0  # type: ignore[attr-defined]
    most, bits = NAMES[name]
    for path, layer in loaded.model.named_modules():  # type: ignore[attr-defined]
        if not isinstance(layer, Linear) or layer.head:
            continue
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
        expected = layers[path](x)
        assert (layer(x) - expected).norm() < most * expected.norm(), path
        assert sum(each.nbytes for each in layer.packed_tensors()) <= layer.in_features * layer.out_features * bits / 8
        count += 1
    assert count
    assert not loaded.model.lm_head.quantized  # type: ignore[attr-defined]


def _layer(weight: torch.Tensor) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0])
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


@pytest.mark.parametrize(("scheme", "most"), [(Mxfp4FromFloats, 0.12), (NvFp4FromFloats, 0.1)])
def test_e2m1_is_near_for_any_size_of_numbers(scheme: Any, most: float) -> None:
    """Encode inputs that are not whole groups, too, and rows without any number but 0."""
    for factor in (1.0, 1e-12, 1e12):
        weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(3)) * factor
        weight[3], weight[4, :32] = 0, 0
        meant = scheme(Shared()).read_codes(_layer(weight)).widened(torch.float32)
        assert (meant - weight).norm() < most * weight.norm()
        assert not meant[3].any()


def test_powers_of_two_have_the_least_error_of_their_neighbours() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    made = in_rows(weight, 32, powers)
    errors = (made.widened(torch.float32) - weight).view(8, 2, 32).square().sum(2)
    for other in (lambda parts: powers(parts) / 2, lambda parts: powers(parts) * 2):
        apart = in_rows(weight, 32, other).widened(torch.float32) - weight
        assert (errors <= apart.view(8, 2, 32).square().sum(2) + 1e-6).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_give_scales_that_are_not(broken: float) -> None:
    weight = torch.ones(4, 64)
    weight[1, 3] = broken
    for scheme in (Mxfp4FromFloats, NvFp4FromFloats):
        assert not scheme(Shared()).read_codes(_layer(weight)).scales.isfinite().all()


def test_blocks_are_those_of_a_gpu() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(2)).bfloat16()
    made = blocks_of(weight)
    assert made.scales.shape == (3, 2)
    assert made.numbers.float().abs().amax() == 448
    assert (made.widened(torch.float32) - weight.float()).norm() < 0.04 * weight.float().norm()


def test_experts_and_other_layers_may_differ() -> None:
    config = {"quant_method": "online", "linear": "mxfp4", "moe": {"weight": "int8_per_channel_static"}}
    method = ByConfig({**config, "ignore": ["re:.*down_proj"]})
    found = {name: method.scheme(LinearLayer(name, 64, 64)) for name in ("a.up", "a.experts.0.up", "a.down_proj")}
    assert [type(each).__name__ for each in found.values()] == ["Mxfp4FromFloats", "Online", "NoneType"]
    assert NvFp4PerToken({}).scheme(LinearLayer("layers.0.up", 64, 64)) is None
    assert isinstance(NvFp4PerToken({}).scheme(LinearLayer("layers.0.experts.0.up", 64, 64)), NvFp4FromFloats)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "--hf-overrides"),
        ({"linear": "int3"}, "as 'linear', not 'int3'"),
        ({"linear": ["mxfp4"]}, "as 'linear'"),
        ({"moe": {"weight": "mxfp4", "activation": "mxfp8"}}, "'activation' of 'moe'"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], said: str) -> None:
    assert said in (ByConfig.refuses(config, CPU, torch.bfloat16) or "")


def test_a_device_without_the_kernel_is_named() -> None:
    assert Mxfp8.refuses({}, CPU, torch.bfloat16) is None
    said = Mxfp8.refuses({}, GPU, torch.bfloat16)
    assert said


def test_a_checkpoint_of_floats_is_given_a_configuration(folder: Path, plugins: Plugins) -> None:
    stated = {"quant_method": "online", "linear": "fp8_per_block"}
    loaded = load_folder(folder, plugins, hf_overrides={"quantization_config": stated})
    assert loaded.info.quantization == "online"
    with pytest.raises(ConfigError, match="--quantization online: takes what weights become"):
        load_folder(folder, plugins, quantization="online")
