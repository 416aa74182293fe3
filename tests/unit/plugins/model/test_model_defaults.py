"""What a model reads in config.json: a key that is missing means what the library means by it, or is an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from ferrule import checkpoint
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule.plugin import discover
from ferrule_nn import Decoder, Rope, building
from ferrule_testkit.checkpoints import NATIVE, RECIPES, tiny_config
from tests.shared import some

PLUGINS = discover()
ELSEWHERE = {"use_cache", "max_position_embeddings", "n_positions", "max_seq_len", "vocab_size_per_layer_input"}
COMMON = set(PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}


def architecture(name: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[RECIPES[name].model_type]


def described(cls: type[Decoder], stated: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Return all that a model takes from its configuration: numbers, rotations, and the modules and shapes of a
    layer.
    """
    (folder / "config.json").write_text(json.dumps(stated))
    config = checkpoint.completed(checkpoint.read(folder), cls.config_names, cls.config_defaults)
    ctx = BuildContext(config=config, dtype=torch.float32, device=torch.device("meta"), block_size=4, max_model_len=64)
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.config, model.spec = config, cls.describe(model, ctx)
    model.rope, model.local_rope = model.make_rope(ctx), model.make_local_rope(ctx)
    with building(ctx):
        model.make_positions(ctx)
        layer = model.make_layer(0)
    # a layer's kind is not in a file without `layer_types`, and matters where it decides the rotation
    spec = model.spec if model.local_rope is not None else replace(model.spec, sliding=())
    rotations = [rotation(rope) for rope in (model.rope, model.local_rope) if rope is not None]
    shapes = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
    return spec, rotations, repr(layer), shapes


def rotation(rope: Rope) -> tuple[Any, ...]:
    return rope.config.kind, rope.config.theta, rope.interleaved, rope.factor, rope.inv_freq.tolist()


@pytest.mark.parametrize("name", some(name for name in NATIVE if "-" not in name and name != "opt"))
def test_a_missing_key_means_what_it_means_in_transformers(name: str, tmp_path: Path) -> None:
    cls = PLUGINS.load("model", architecture(name))
    config = tiny_config(name)
    whole = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture(name)]}
    checked, file = 0, tmp_path / "config.json"
    for key in set(whole) - COMMON - ELSEWHERE:
        less = {other: value for other, value in whole.items() if other != key}
        try:
            file.write_text(json.dumps(less))
            meant = json.loads(type(config).from_json_file(file).to_json_string(use_diff=False))
        except Exception:  # its default contradicts the tiny sizes
            continue
        try:
            expected = described(cls, {**meant, "architectures": whole["architectures"]}, tmp_path)
        except CheckpointError:  # the same, where the library does not look
            continue
        try:
            assert described(cls, less, tmp_path) == expected, key
        except CheckpointError as error:
            names = {key, cls.config_names.get(key, key)}
            if not any(repr(name) in error.message for name in names):
                raise
        checked += 1
    assert checked > 5


def test_every_native_architecture_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    names = [ref.name for ref in PLUGINS.refs if ref.kind == "model" and ref.builtin and ref.name != "transformers"]
    assert [name for name in names if f"`{name}`" not in page] == []
