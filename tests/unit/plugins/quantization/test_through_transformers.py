"""Quantized checkpoints through transformers: logits beside those of the floats that the weights stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_nn import Linear
from ferrule_testkit.quantized import quantized_checkpoint
from tests.unit.plugins.quantization.loading import load_folder


def _products(folder: Path, plugins: Plugins) -> tuple[torch.Tensor, int]:
    """Return the products of all layers of the last block, one after the other, and how many of them are quantized."""
    loaded = load_folder(folder, plugins, model_impl="transformers")
    assert "transformers" in loaded.info.implementation
    model = loaded.model
    assert isinstance(model, torch.nn.Module)
    block = dict(model.inner.named_modules())["model.layers.1"]  # type: ignore[union-attr]
    results, layers = [], 0
    for name, layer in block.named_modules():
        if name.endswith("_proj"):
            x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1))
            results.append(layer(x).flatten())
            layers += isinstance(layer, Linear)
    return torch.cat(results), layers


@pytest.mark.parametrize("name", ["gptq-zeros", "awq", "packed", "int8", "fp8-exponents", "modelopt-int4"])
def test_equals_the_floats_that_it_stands_for(folder: Path, plugins: Plugins, tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    meant = quantized_checkpoint(folder, made, name)
    floats = load_file(folder / "model.safetensors")
    save_file({**floats, **meant}, tmp_path / "floats.safetensors", metadata={"format": "pt"})
    results, layers = _products(made, plugins)
    assert layers == 7
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (plain / file.name).write_bytes(file.read_bytes())
    (tmp_path / "floats.safetensors").rename(plain / "model.safetensors")
    expected, layers = _products(plain, plugins)
    assert layers == 0
    assert (results - expected).norm() < 0.02 * expected.norm()


def test_a_layer_that_lacks_a_tensor_is_told(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    made = tmp_path / "made"
    quantized_checkpoint(folder, made, "awq")
    tensors = load_file(made / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.scales"]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks tensors of model\.layers\.1\.mlp\.down_proj"):
        load_folder(made, plugins, model_impl="transformers")
