"""Sizes of config.json that cannot be are named before anything is allocated: by a start, and by `ferrule models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ferrule.assembly import model as assembly
from ferrule.config import Config, LoadConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import CheckpointError
from ferrule.plugin import discover
from ferrule_plugins.command.models.report import describe
from ferrule_testkit.checkpoints import tiny_checkpoint

PLUGINS = discover()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("headers") / "llama")


@pytest.mark.parametrize("form", ["native", "transformers"])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"hidden_size": 1_000_000}, "hidden_size"),
        ({"hidden_size": 128}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"intermediate_size": 16_000_000}, "intermediate_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_attention_heads": 60_000, "num_key_value_heads": 60_000}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 60_000}, "head_dim"),
        ({"num_hidden_layers": -2}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 4000}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"vocab_size": 60_000_000}, "vocab_size"),
        ({"rope_theta": float("nan"), "rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "rope_parameters"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ],
)
def test_a_size_that_cannot_be_is_named_before_anything_is_allocated(
    tmp_path: Path, llama: Path, form: str, changes: dict[str, Any], key: str
) -> None:
    (tmp_path / "model.safetensors").symlink_to(llama / "model.safetensors")
    config = {**json.loads((llama / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(model=str(tmp_path), model_impl=form, dtype="float32")
    resolved = resolve(Config(model=model, load=LoadConfig(use_tqdm_on_load=False)))
    with mock.patch.object(assembly, "build") as build:
        with pytest.raises(CheckpointError) as caught:
            assembly.load_model(resolved, PLUGINS)
        assert not build.called
    said = caught.value.message
    assert f"'{key}'" in said
    assert "config.json" in said
    assert len(said) < 600
    try:
        refusal = describe(resolved, PLUGINS, str(tmp_path)).refusal
    except CheckpointError as error:
        refusal = error.message
    assert said in refusal


def test_sizes_that_the_weights_have_are_taken(llama: Path) -> None:
    model = ModelConfig(model=str(llama), dtype="float32")
    resolved = resolve(Config(model=model, load=LoadConfig(use_tqdm_on_load=False)))
    assembly.check_model(resolved, PLUGINS)
    assert describe(resolved, PLUGINS, str(llama)).refusal == ""
    smaller = ModelConfig(model=str(llama), dtype="float32", hf_overrides={"num_hidden_layers": 1})
    resolved = resolve(Config(model=smaller, load=LoadConfig(use_tqdm_on_load=False)))
    for start in (assembly.check_model, assembly.load_model):
        with pytest.raises(CheckpointError, match="holds a tensor that the model does not have"):
            start(resolved, PLUGINS)
