"""HQQ's own files: layers with scales and zero points that are quantized themselves, and files that are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.load_format import pt
from ferrule_plugins.load_format.hqq_file import FILE
from tests.mutations import fuzz
from tests.unit.plugins.quantization.loading import load_folder

Layer = dict[str, Any]
_META = {"unpack_view_dtype": torch.uint8, "view_as_float": False, "compute_dtype": torch.float16}


def _eight_bits(values: torch.Tensor, group: int | None) -> tuple[torch.Tensor, Layer, torch.Tensor]:
    """Return numbers, their metadata, and their floats: in groups of far entries, or one for all."""
    cells = values if group is None else values.reshape(group, -1)
    low, high = (cells.min(), cells.max()) if group is None else (cells.amin(0, True), cells.amax(0, True))
    scale = ((high - low) / 255).clamp(min=1e-6)
    zero = -low / scale
    numbers = (cells / scale + zero).round().clamp(0, 255)
    meta = {"nbits": 8, "group_size": group, "axis": 0, "packing": "8bit_u8", "shape": values.shape, **_META}
    return (
        numbers.to(torch.uint8),
        {**meta, "scale": scale, "zero": zero},
        ((numbers - zero) * scale).view(values.shape),
    )


def _layer(n: int, k: int, form: str, seed: int = 0) -> tuple[Layer, torch.Tensor]:
    """Return a layer of 4 bits in groups of 16 as HQQ keeps it, and its weights."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 16, (n * k // 16, 16), generator=draw)
    scale, zero = torch.rand((len(rows), 1), generator=draw) * 0.01 + 0.005, torch.rand((len(rows), 1), generator=draw)
    zero_q, meta_zero, zero = _eight_bits(zero * 15, 128 if form == "stacked" else None)
    half = len(rows) // 2
    numbers = (rows[:half] << 4 | rows[half:]).to(torch.uint8)
    meta = {"nbits": 4, "group_size": 16, "axis": 1, "packing": "4bit_u8", "shape": torch.Size((n, k)), **_META}
    if form == "zeros":
        meta |= {"scale": scale, "zero_q": zero_q, "meta_zero": meta_zero}
    else:
        scale_q, meta_scale, scale = _eight_bits(scale, 128)
        both = (
            {"zero_q": zero_q, "scale_q": scale_q} if form == "both" else {"zero_scale": torch.stack((zero_q, scale_q))}
        )
        meta |= {**both, "meta_zero": meta_zero, "meta_scale": meta_scale}
    layer = {"W_q": torch.nn.Parameter(numbers, False), "bias": None}
    meant = ((rows - zero) * scale).view(n, k)
    return ({**layer, "meta": meta} if form == "stacked" else {**layer, **meta, "stores_quant_config": True}), meant


def _written(folder: Path, made: Path, form: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint in HQQ's own file; return the weights that its layers encode."""
    made.mkdir()
    for file in folder.glob("*.json"):
        shutil.copy(file, made)
    modules: dict[str, Layer] = {}
    meant = {}
    for number, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        path, _, own = name.rpartition(".")
        modules[path] = {own: tensor}
        if path.endswith("_proj"):
            modules[path], meant[path] = _layer(*tensor.shape, form, seed=number)
    torch.save(modules, made / FILE)
    return meant


@pytest.mark.parametrize("form", ["zeros", "both", "stacked"])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_scales_and_zero_points_that_are_quantized(
    folder: Path, plugins: Plugins, tmp_path: Path, form: str, implementation: str
) -> None:
    meant = _written(folder, tmp_path / "made", form)
    loaded = load_folder(tmp_path / "made", plugins, quantization="hqq", model_impl=implementation)
    assert isinstance(loaded.model, torch.nn.Module)
    assert loaded.info.quantization == "hqq"
    name = "layers.1.mlp.down_proj"
    layer = next(part for path, part in loaded.model.named_modules() if path.endswith(name))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    expected = x @ meant[f"model.{name}"].t()
    assert (layer(x) - expected).norm() < 5e-3 * expected.norm()


def test_the_method_must_be_named(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    _written(folder, tmp_path / "made", "both")
    with pytest.raises(CheckpointError, match="W_q") as told:
        load_folder(tmp_path / "made", plugins)
    assert "--quantization" in str(told.value.hint)


def _spoiled(layer: Layer, path: tuple[str, ...], value: Any) -> Layer:
    key, *rest = path
    return {**layer, key: _spoiled(layer[key], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("zero_q",), None, "has neither 'zero'"),
        (("meta_zero",), torch.ones(2), "has neither 'zero'"),
        (("meta_zero", "shape"), (10**12, 10**12), "are not those of"),
        (("meta_zero", "shape"), (-4, -64), "has no shape"),
        (("meta_zero", "shape"), "x", "has no shape"),
        (("meta_zero", "packing"), "5bit_u8", "packed in another way"),
        (("meta_zero", "scale"), torch.ones(1000, 1000), "are of another shape"),
        (("meta_scale", "zero"), 3.0, "has no zero"),
        (("meta_scale", "scale"), torch.ones(1, 1, 2), "are of another shape"),
        (("scale_q",), torch.tensor(1, dtype=torch.uint8), "are not those of"),
        (("scale_q",), torch.empty(0, 0, dtype=torch.uint8), "are not those of"),
        (("W_q",), None, "is not a tensor"),
        (("bias",), 5, "is not a tensor"),
        (("zero_scale",), torch.ones(3, 3), "does not hold two"),
    ],
)
def test_files_that_are_damaged_are_told(tmp_path: Path, path: tuple[str, ...], value: Any, said: str) -> None:
    layer, _ = _layer(64, 64, "both")
    torch.save({"model.layers.0.mlp.down_proj": _spoiled(layer, path, value)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=said):
        pt.read_file(tmp_path / FILE)


def test_other_entries_than_modules_are_told(tmp_path: Path) -> None:
    layer, _ = _layer(64, 64, "both")
    torch.save({"a": layer, "b": torch.ones(2)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="b: it is not a module"):
        pt.read_file(tmp_path / FILE)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    torch.save({"a": _layer(64, 64, "both")[0], "b": {"weight": torch.ones(2)}}, tmp_path / "good")
    assert 0 < fuzz(tmp_path / FILE, (tmp_path / "good").read_bytes(), pt.read_file, 300, 1) < 300


def test_settings_that_newer_versions_ignore(folder: Path, plugins: Plugins, tmp_path: Path) -> None:
    """Load a file with floats, whose configuration asks for quantized scales."""
    meant = _written(folder, tmp_path / "made", "zeros")
    content = torch.load(tmp_path / "made" / FILE, weights_only=True)
    tensors = pt.read_file(tmp_path / "made" / FILE)
    assert all(tensors[f"{name}.zero"].is_floating_point() for name in meant)
    params = {"weight_quant_params": {"nbits": 4, "group_size": 16, "axis": 1}, "zero_quant_params": {"nbits": 8}}
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    stated = {"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head"]}
    (tmp_path / "made" / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    assert len(content) > len(meant)
    assert load_folder(tmp_path / "made", plugins).info.quantization == "hqq"
