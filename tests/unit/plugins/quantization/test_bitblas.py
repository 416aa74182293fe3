"""Checkpoints in the form of BitBLAS: numbers in bytes, permuted for float16, and zero points of two names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.quantization.groupwise import Awq, Gptq
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import quantized_checkpoint
from tests.unit.plugins.quantization.loading import load_folder
from tests.unit.plugins.quantization.packers import Numbers, Tensors, drawn, loaded, merged, off, words

CPU = fake_caps()
NEAR = 5e-3


def _bitblas(given: Numbers, bits: int, dtype: torch.dtype = torch.float16, zeros: str | None = "qzeros") -> Tensors:
    """Pack as BitBLAS: numbers of even places are in a word's lower half, for float16; of 2 bits bytes are in turns."""
    numbers = given.numbers
    if dtype == torch.float16 and bits < 8:
        each = numbers.view(len(numbers), -1, 32 // bits)
        halves = torch.cat((each[..., ::2], each[..., 1::2]), -1)
        if bits == 2:
            quarters = halves.unflatten(-1, (4, 4))
            halves = quarters[..., [0, 2, 1, 3], :].flatten(-2)
        numbers = halves.flatten(1)
    made = {"qweight": words(numbers, bits, torch.int8), "scales": given.scales.to(dtype)}
    return made if zeros is None else {**made, zeros: words(given.zeros.t(), bits, torch.int8)}


def _method(bits: int, group: int, **more: Any) -> Gptq:
    stated = {"checkpoint_format": "bitblas", "bits": bits, "group_size": group or -1, "sym": False, "desc_act": False}
    config = {"quant_method": "gptq", **stated, **more}
    assert Gptq.refuses(config, CPU, torch.bfloat16) is None
    return Gptq(config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [0, 32])
def test_layers(bits: int, group: int, dtype: torch.dtype) -> None:
    given = drawn(64, 96, bits, group)
    layer = loaded(_method(bits, group), _bitblas(given, bits, dtype), (64, 96))
    assert off(layer, given.meant) < NEAR


@pytest.mark.parametrize("zeros", ["qzeros", "zeros", None])
@pytest.mark.parametrize("bits", [2, 4])
def test_symmetric_layers_need_no_zero_points(bits: int, zeros: str | None) -> None:
    given = drawn(64, 96, bits, 32, symmetric=True)
    layer = loaded(_method(bits, 32, sym=True), _bitblas(given, bits, zeros=zeros), (64, 96))
    assert off(layer, given.meant) < NEAR
    empty = {**_bitblas(given, bits, zeros=None), "qzeros": torch.empty(0, dtype=torch.int8)}
    assert off(loaded(_method(bits, 32, sym=True), empty, (64, 96)), given.meant) < NEAR


def test_merged_projections_and_awq() -> None:
    rows = {"q_proj": 64, "k_proj": 32}
    parts = {name: drawn(count, 96, 4, 32, seed=count) for name, count in rows.items()}
    method = Awq({"quant_method": "awq", "bits": 4, "group_size": 32, "format": "bitblas", "zero_point": True})
    layer = merged(method, {name: _bitblas(own, 4) for name, own in parts.items()}, rows, 96)
    assert off(layer, torch.cat([own.meant for own in parts.values()])) < NEAR


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("flag", [{"checkpoint_format": "bitblas"}, {"is_bitblas_format": True}])
def test_a_checkpoint_whose_zero_points_have_the_other_name(
    folder: Path, plugins: Plugins, tmp_path: Path, implementation: str, flag: dict[str, Any]
) -> None:
    meant = quantized_checkpoint(folder, tmp_path / "made", "gptq")
    from safetensors.torch import load_file

    file, expected = tmp_path / "made" / "model.safetensors", dict[str, torch.Tensor]()
    tensors = {name: tensor for name, tensor in load_file(file).items() if name.endswith(".weight")}
    for number, (name, weight) in enumerate(meant.items()):
        given = drawn(*weight.shape, 4, 32, seed=number)
        path = name.removesuffix(".weight")
        tensors.update({f"{path}.{end}": each.contiguous() for end, each in _bitblas(given, 4, zeros="zeros").items()})
        expected[path] = given.meant
    save_file(tensors, file)
    config = json.loads((file.parent / "config.json").read_text())
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **flag}
    (file.parent / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    loaded = load_folder(file.parent, plugins, quantization="bitblas", model_impl=implementation)
    assert isinstance(loaded.model, torch.nn.Module)
    name = "layers.1.mlp.down_proj"
    layer = next(part for path, part in loaded.model.named_modules() if path.endswith(name))
    weight = expected[f"model.{name}"]
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
    assert (layer(x) - x @ weight.t()).norm() < NEAR * (x @ weight.t()).norm()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, "reads 2, 4, 8 bits"),
        ({"desc_act": True}, "desc_act=true in the form of BitBLAS"),
        ({"bits": 8, "sym": True}, "symmetric weights of 8 bits"),
        ({"dynamic": {"+:x": {"bits": 8, "sym": True}}}, "symmetric weights of 8 bits"),
    ],
)
def test_what_is_not_read_is_told(changes: dict[str, Any], said: str) -> None:
    config = {"quant_method": "gptq", "checkpoint_format": "bitblas", "bits": 4, "group_size": 32, **changes}
    assert said in (Gptq.refuses(config, CPU, torch.bfloat16) or "")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("qweight", torch.zeros((4, 6, 16, 8), dtype=torch.int8), "has the shape"),
        ("qweight", torch.zeros((64, 48), dtype=torch.int32), "the format has torch.int8"),
        ("qzeros", torch.zeros((2, 32), dtype=torch.int8), "has the shape"),
        ("scales", torch.zeros((64, 3), dtype=torch.int8), "of another form"),
        ("scales", torch.zeros((64, 2)), "of another form"),
        ("scales", torch.full((64, 3), float("nan")).half(), "not a finite number"),
    ],
)
def test_tensors_of_another_form_are_told(name: str, value: torch.Tensor, said: str) -> None:
    tensors = _bitblas(drawn(64, 96, 4, 32), 4)
    with pytest.raises(CheckpointError, match=said):
        loaded(_method(4, 32), {**tensors, name: value}, (64, 96))


def test_scales_of_several_types_are_told() -> None:
    rows = {"q_proj": 64, "k_proj": 32}
    types = {"q_proj": torch.float16, "k_proj": torch.bfloat16}
    parts = {name: _bitblas(drawn(count, 96, 4, 32), 4, types[name]) for name, count in rows.items()}
    with pytest.raises(CheckpointError, match="of several types"):
        merged(_method(4, 32), parts, rows, 96)


def test_layers_that_do_not_fill_words_or_groups_are_told() -> None:
    for shape, group in (((60, 96), 32), ((64, 96), 64), ((64, 100), 0)):
        with pytest.raises(CheckpointError, match="do not fill words"):
            loaded(_method(4, group), {}, shape)
