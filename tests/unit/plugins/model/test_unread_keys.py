"""Keys of config.json that nothing reads are named; the files of transformers have none, for every architecture."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ferrule.assembly.choose import PluginChooser
from ferrule.assembly.model import check_model, outline
from ferrule.checkpoint import read
from ferrule.config import Config, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import CheckpointError
from ferrule.launch import cli
from ferrule.plugin import Plugins, discover
from ferrule.unread import Watched
from ferrule_contrib import tiny
from ferrule_testkit.checkpoints import NATIVE, tiny_config
from tests.conformance import unpublished

PLANTED = {"attention_temperature_scale": 0.1, "vocab_bias": [1], "norm_twice": True}
HARMLESS: dict[str, Any] = {"_name_or_path": "x", "new_token_id": 7, "use_cache": True, "hidden_dropout": 0.1}
HARMLESS |= {"top_k": 50, "residual_scale": 1.0, "extra_scale": None, "also": {}, "norm_again": False}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


def written(name: str, folder: Path) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    if name in unpublished.MODELS:
        return dict(unpublished.MODELS[name].config)
    from transformers import AutoModelForCausalLM

    config = tiny_config(name)
    cls = AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [cls.__name__]
    config.save_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


def unread(folder: Path, values: dict[str, Any], plugins: Plugins, **model: Any) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    config = resolve(Config(model=ModelConfig(model=str(folder), dtype="float32", **model)))
    choice, _ = outline(config, PluginChooser(plugins), compare=False)
    return choice.unread


@pytest.mark.parametrize("name", [*NATIVE, *unpublished.MODELS])
def test_every_architecture_reads_all_that_transformers_writes(name: str, tmp_path: Path, plugins: Plugins) -> None:
    named = ", ".join(map(repr, sorted(PLANTED)))
    values = {**written(name, tmp_path), **HARMLESS, **PLANTED}
    assert unread(tmp_path, values, plugins) == f"{tmp_path}/config.json: nothing reads {named}"


def test_overrides_and_the_text_part_of_a_composite_file(tmp_path: Path, plugins: Plugins) -> None:
    values = json.loads((tiny.path() / "config.json").read_text())
    assert "'hidden_scale'" in unread(tmp_path, values, plugins, hf_overrides={"hidden_scale": 0.5})
    inner = {**values, "text_scale": 2}
    outer = {
        "architectures": values["architectures"],
        "text_config": inner,
        "vision_scale": 2,
        "torch_dtype": "float32",
    }
    assert unread(tmp_path, outer, plugins).endswith("nothing reads 'text_scale'")


def test_the_library_is_not_asked_what_it_reads(tmp_path: Path, plugins: Plugins) -> None:
    values = json.loads((tiny.path() / "config.json").read_text())
    assert unread(tmp_path, {**values, **PLANTED}, plugins, model_impl="transformers") == ""


@pytest.mark.parametrize("ask", [dict, list, sorted, lambda config: {**config}, lambda config: list(config.items())])
def test_who_copies_or_lists_all_keys_has_asked_for_all(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], **PLANTED}))
    config = Watched(read(tmp_path))
    assert config.unread == tuple(sorted(PLANTED))
    ask(config)
    assert config.unread == ()


def test_copies_share_what_was_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], **PLANTED}))
    config = Watched(read(tmp_path))
    other = copy.copy(config)
    other["more"] = 1
    assert "more" not in config
    assert other == {"architectures": ["A"], "dtype": None, **PLANTED, "more": 1}
    assert config.unread == tuple(sorted(PLANTED))
    assert (other["vocab_bias"], config.get("norm_twice"), "attention_temperature_scale" in other) == ([1], True, True)
    assert config.unread == other.unread == ()


def test_the_log_of_a_start_and_what_ferrule_models_says(
    tmp_path: Path, plugins: Plugins, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in tiny.path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    values = json.loads((tiny.path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **PLANTED}))
    check_model(resolve(Config(model=ModelConfig(model=str(tmp_path)))), plugins)
    said = [record.getMessage() for record in caplog.records if "nothing reads" in record.getMessage()]
    assert said == [f"{tmp_path}/config.json: nothing reads 'attention_temperature_scale', 'norm_twice', 'vocab_bias'"]
    assert cli.main(["models", str(tmp_path)]) == 0
    assert "nothing reads 'attention_temperature_scale', 'norm_twice', 'vocab_bias'" in capsys.readouterr().out


def test_a_setting_under_several_names_is_named_where_they_differ(tmp_path: Path, plugins: Plugins) -> None:
    values = json.loads((tiny.path() / "config.json").read_text())
    same = {"d_model": values["hidden_size"], "layer_norm_eps": values["rms_norm_eps"], "activation_function": "gelu"}
    assert unread(tmp_path, {**values, **same}, plugins) == ""
    assert unread(tmp_path, {**values, "layer_norm_eps": 0.5}, plugins).endswith("nothing reads 'layer_norm_eps'")


def test_scores_of_experts_that_a_model_does_not_have(tmp_path: Path, plugins: Plugins) -> None:
    values = written("deepseek_v3", tmp_path)
    assert unread(tmp_path, {**values, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}, plugins) == ""
    with pytest.raises(CheckpointError, match="'scoring_func' 'softmax' is not supported; this model has sigmoid"):
        unread(tmp_path, {**values, "scoring_func": "softmax"}, plugins)
