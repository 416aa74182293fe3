"""torchao's orders of numbers of 4 bits, and embeddings of integers that become floats as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.errors import CheckpointError
from ferrule.interfaces.plugins import Plugins
from ferrule_plugins.quantization.embeddings import decode_tensors
from ferrule_plugins.quantization.torchao import TorchAo
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.quantized import FORMATS, quantized_checkpoint
from tests.unit.plugins.quantization.loading import load_folder
from tests.unit.plugins.quantization.packers import Tensors, drawn, layer_of, loaded, merged, off, words

CPU = fake_caps()
NEAR = 5e-3


def _method(kind: str = "Int4WeightOnlyConfig", **values: Any) -> TorchAo:
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": values}}}
    assert TorchAo.refuses(config, CPU, torch.bfloat16) is None
    return TorchAo(config)


def _tiled(n: int, k: int, group: int, seed: int = 0) -> tuple[Tensors, torch.Tensor]:
    """Pack as ``matrix_to_m16n8k16_Bint4_layout`` does: thread by thread; the padding is not zero."""
    draw = torch.Generator().manual_seed(seed)
    outputs, inputs = -(-n // 8) * 8, -(-k // 1024) * 1024
    numbers = torch.randint(0, 16, (outputs, inputs), generator=draw)
    both = torch.rand((inputs // group, outputs, 2), generator=draw).bfloat16() * 0.02
    packed = torch.zeros((outputs // 8, inputs // 128, 32, 4), dtype=torch.int64)
    for thread in range(32):
        for span in range(4):
            for place in range(8):
                column = 32 * span + 2 * (thread % 4) + 8 * (place % 4) + place // 4
                packed[:, :, thread, span] |= numbers[thread // 4 :: 8, column::128] << (4 * place)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    scale, added = (each.t().repeat_interleave(group, 1).float() for each in both.unbind(-1))
    meant = ((numbers - 8) * scale + added)[:n, :k]
    return {"_weight_qdata": signed, "_weight_scale_and_zero": both}, meant


@pytest.mark.parametrize(("n", "k", "group"), [(64, 1024, 128), (44, 96, 32), (8, 1280, 256)])
def test_tiles(n: int, k: int, group: int) -> None:
    tensors, meant = _tiled(n, k, group)
    layer = loaded(_method(group_size=group, int4_packing_format="tile_packed_to_4d"), tensors, (n, k))
    assert off(layer, meant) < NEAR


def test_tiles_of_projections_are_each_filled_up() -> None:
    rows = {"q_proj": 44, "k_proj": 20}
    parts = {name: _tiled(count, 96, 32, seed=count) for name, count in rows.items()}
    method = _method(group_size=32, int4_packing_format={"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"})
    layer = merged(method, {name: tensors for name, (tensors, _) in parts.items()}, rows, 96)
    assert off(layer, torch.cat([meant for _, meant in parts.values()])) < NEAR


def test_words_in_order() -> None:
    given = drawn(40, 96, 4, 32)
    tensors = {
        "_weight_qdata": words(given.numbers, 4),
        "_weight_scale": given.scales.t(),
        "_weight_zero_point": given.zeros.t().to(torch.int8),
    }
    method = _method(group_size=32, int4_packing_format="plain_int32")
    assert off(loaded(method, tensors, (40, 96)), given.meant) < NEAR
    floats = {**tensors, "_weight_zero_point": given.zeros.t().float()}  # as on Huawei's devices
    with pytest.raises(CheckpointError, match="the format has torch.int8"):
        loaded(method, floats, (40, 96))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("_weight_qdata", torch.zeros((8, 8, 32, 2), dtype=torch.int32), "has the shape"),
        ("_weight_qdata", torch.zeros((8, 8, 32, 4), dtype=torch.int64), "the format has torch.int32"),
        ("_weight_scale_and_zero", torch.zeros((8, 64, 1)), "has the shape"),
        ("_weight_scale_and_zero", torch.full((8, 64, 2), float("inf")), "not a finite number"),
    ],
)
def test_tiles_of_another_form_are_told(name: str, value: torch.Tensor, said: str) -> None:
    tensors, _ = _tiled(64, 1024, 128)
    method = _method(group_size=128, int4_packing_format="tile_packed_to_4d")
    with pytest.raises(CheckpointError, match=said):
        loaded(method, {**tensors, name: value}, (64, 1024))


def test_layers_that_groups_do_not_fill_stay_as_they_are() -> None:
    """Leave out the layers that torchao leaves out."""
    assert _method().scheme(layer_of(inputs=192)) is None
    assert _method().scheme(layer_of(inputs=256)) is not None


def test_activations_of_fp8_are_not_quantized() -> None:
    method = _method("Float8DynamicActivationInt4WeightConfig", int4_packing_format="plain")
    assert getattr(method.scheme(layer_of(inputs=256)), "wide", False)


def test_heads_are_quantized_with_embeddings() -> None:
    head, config = layer_of("lm_head", inputs=256), _method().config
    assert _method().scheme(head) is None
    assert TorchAo({**config, "include_input_output_embeddings": True}).scheme(head) is not None


# ---------------------------------------------------------------------------------------- embeddings


def _embedding(n: int, k: int, groups: int) -> tuple[Tensors, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(-8, 8, (n, k), generator=draw).to(torch.int8)
    zeros = torch.randint(-3, 4, (n, groups), generator=draw).to(torch.int8)
    scales = torch.rand((n, groups), generator=draw) * 0.02
    cells = (numbers.view(n, groups, -1) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    return {"_weight_qdata": numbers, "_weight_scale": scales, "_weight_zero_point": zeros}, cells.flatten(1)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_embedding_becomes_floats(
    folder: Path, plugins: Plugins, tmp_path: Path, implementation: str, groups: int
) -> None:
    quantized_checkpoint(folder, tmp_path / "made", "torchao-int8")
    file = tmp_path / "made" / "model.safetensors"
    tensors = load_file(file)
    embedding, meant = _embedding(*tensors.pop("model.embed_tokens.weight").shape, groups)
    save_file({**tensors, **{f"model.embed_tokens.{name}": each for name, each in embedding.items()}}, file)
    config = json.loads((file.parent / "config.json").read_text())
    every = FORMATS["torchao-int8"].config["quant_type"]["default"]
    own = {"_type": "IntxWeightOnlyConfig", "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}}
    named = {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"_default": every, "model.embed_tokens": own}}}
    stated = {**config["quantization_config"], "quant_type": {"default": named}, "modules_to_not_convert": ["lm_head"]}
    stated["include_input_output_embeddings"] = True
    (file.parent / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    loaded = load_folder(file.parent, plugins, model_impl=implementation)
    assert isinstance(loaded.model, torch.nn.Module)
    table = next(part for name, part in loaded.model.named_modules() if name.endswith("embed_tokens"))
    ids = torch.tensor([0, 3, 5])
    torch.testing.assert_close(table(ids), meant[ids])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("_weight_qdata", torch.zeros((8, 16)), "not of integers"),
        ("_weight_qdata", torch.zeros(8, dtype=torch.int8), "not of integers"),
        ("_weight_scale", torch.zeros((8, 3)), "not of integers"),
        ("_weight_zero_point", torch.zeros((8, 2)), "not of integers"),
        ("_weight_qdata", torch.zeros((4, 16), dtype=torch.int8), "are not those of"),
        ("_weight_qdata", torch.zeros((8, 15), dtype=torch.int8), "are not those of"),
        ("_weight_scale", torch.full((8, 2), float("nan")), "not a finite number"),
        ("_weight_scale", None, "needs qdata, scale"),
    ],
)
def test_embeddings_of_another_form_are_told(name: str, value: torch.Tensor | None, said: str) -> None:
    tensors = {**_embedding(8, 16, 2)[0], name: value}
    with pytest.raises(CheckpointError, match=said):
        list(decode_tensors((f"model.embed_tokens.{end}", each) for end, each in tensors.items() if each is not None))


def test_an_embedding_without_numbers_is_told() -> None:
    empty = {
        "_weight_qdata": torch.zeros((0, 16), dtype=torch.int8),
        "_weight_scale": torch.zeros((0, 0)),
        "_weight_zero_point": torch.zeros((0, 0), dtype=torch.int8),
    }
    with pytest.raises(CheckpointError, match="are not those of"):
        list(decode_tensors((f"wte.{end}", each) for end, each in empty.items()))
