"""nf4, fp4 and int8 of bitsandbytes, from files and from floats; whole checkpoints are in test_formats.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_nn import Linear
from ferrule_nn.loading import load_into
from ferrule_plugins.quantization.bitsandbytes import FP4, NF4, BitsAndBytes
from ferrule_quant.code_tables import E2M1, Coded
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import bitsandbytes, bitsandbytes_rows
from tests.unit.plugins.quantization.loading import load_folder

CPU = fake_caps()
NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def _loaded(config: dict[str, Any], tensors: dict[str, torch.Tensor], inputs: int, outputs: int) -> Linear:
    model = torch.nn.ModuleDict({"proj": Linear(inputs, outputs)})
    layer = model["proj"]
    assert isinstance(layer, Linear)
    assert layer.quantize("proj", BitsAndBytes(config))
    load_into(model, ((f"proj.{name}", tensor) for name, tensor in tensors.items()))
    assert layer.packed
    return layer


def _drawn(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("inputs", [96, 40, 8])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_may_reach_into_the_next_output(inputs: int, nested: bool) -> None:
    """Decode also where the last block and the last 256 scales are not full: 808 outputs."""
    tensors, meant = bitsandbytes(_drawn(808, inputs), nested=nested)
    layer = _loaded({**NESTED, "bnb_4bit_use_double_quant": nested}, tensors, inputs, 808)
    x = _drawn(5, inputs)
    expected = x @ meant.t()
    assert (layer(x) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("table", "bound"), [(E2M1, 0.0), (NF4, 0.5 / 127), (FP4, 0.5 / 127)])
def test_what_tables_lose_in_8_bits(table: tuple[float, ...], bound: float) -> None:
    made = Coded(torch.arange(16, dtype=torch.uint8)[None], table, torch.ones(1, 2), 8)
    kept = made.integers()
    off = kept.centred() * kept.scales[0, 0] - torch.tensor([table])
    assert off.abs().max() <= bound * (1 + 1e-5)
    assert torch.equal(made.widened(torch.float32), torch.tensor([table]))


def test_floats_are_made_nf4(folder: Path, plugins: Plugins) -> None:
    """Encode with the error that nf4 has for weights of a normal distribution, about 0.09, and no more."""
    plain, made = (load_folder(folder, plugins, quantization=name) for name in (None, "bitsandbytes"))
    assert isinstance(plain.model, torch.nn.Module)
    assert isinstance(made.model, torch.nn.Module)
    layers = dict(made.model.named_modules())
    for name, layer in plain.model.named_modules():
        if isinstance(layer, Linear) and not layer.head:
            assert layers[name].quantized
            x = _drawn(7, layer.in_features)
            expected = layer(x)
            assert 0.02 < (layers[name](x) - expected).norm() / expected.norm() < 0.12, name
    assert not layers["lm_head"].quantized


def _stated(tensors: dict[str, torch.Tensor], **changed: Any) -> dict[str, torch.Tensor]:
    name = "weight.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(tensors[name].tolist())), **changed}
    return {**tensors, name: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"blocksize": 128}, "blocksize is not 64"),
        ({"quant_type": "fp4"}, "quant_type is not nf4"),
        ({"nested_offset": "much"}, "nested_offset is not a number"),
        ({"nested_offset": float("nan")}, "not a finite number"),
        ({"nested_offset": 10**400}, "nested_offset is not a number"),
        ({"more": "x" * 5000}, "no text of a usual length"),
    ],
)
def test_a_state_that_says_otherwise_is_refused(changed: dict[str, Any], message: str) -> None:
    tensors, _ = bitsandbytes(_drawn(16, 64), nested=True)
    with pytest.raises(CheckpointError) as raised:
        _loaded(NESTED, _stated(tensors, **changed), 64, 16)
    assert message in f"{raised.value.message} {raised.value.__cause__}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.zeros(9, 1, dtype=torch.uint8)),
        ("weight.absmax", torch.zeros(9, dtype=torch.uint8)),
        ("weight.absmax", torch.zeros(16)),
        ("weight.nested_absmax", torch.zeros(2)),
        ("weight.nested_quant_map", torch.zeros(16)),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([123, 255], dtype=torch.uint8)),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([0.5])),
        ("weight.nested_absmax", torch.tensor(1.0)),
    ],
)
def test_tensors_of_another_form_are_refused(name: str, value: torch.Tensor) -> None:
    tensors, _ = bitsandbytes(_drawn(16, 64), nested=True)
    with pytest.raises(CheckpointError, match="of another form"):
        _loaded(NESTED, {**tensors, name: value}, 64, 16)


def test_rows_that_are_not_finite_are_refused() -> None:
    tensors, _ = bitsandbytes_rows(_drawn(16, 64))
    tensors["SCB"][3] = torch.nan
    with pytest.raises(CheckpointError, match="not a finite number"):
        _loaded({"load_in_8bit": True}, tensors, 64, 16)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "neither"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "is 'nf3'"),
        ({"load_in_4bit": True}, None),
        ({"load_in_8bit": True}, None),
        ({}, None),
    ],
)
def test_what_is_read(config: dict[str, Any], reason: str | None) -> None:
    said = BitsAndBytes.refuses(config, CPU, torch.bfloat16)
    assert said is None if reason is None else said is not None and reason in said


def test_layers_that_the_checkpoint_names_stay_floats() -> None:
    method = BitsAndBytes({**NESTED, "llm_int8_skip_modules": ["proj"]})
    assert not Linear(64, 16).quantize("layers.0.proj", method)
    assert Linear(64, 16).quantize("layers.0.other", method)
