"""How prompts become vectors, from the files of sentence-transformers and --pooler-config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ferrule.assembly.pooling import read_pooling
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import PoolingSpec


def write(folder: Path, pooling: dict[str, Any], *names: str) -> Path:
    modules = [
        {"idx": n, "path": f"{n}_{name}", "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(names or ("Transformer", "Pooling", "Normalize"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_a_folder_without_modules_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, {}) == PoolingSpec(kind=None, normalize=True)
    assert read_pooling(tmp_path, {"pooling_type": "MEAN"}) == PoolingSpec(kind="mean", normalize=True)
    assert read_pooling(tmp_path, {"normalize": False}) == PoolingSpec(kind=None, normalize=False)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_modules_say_kind_and_normalisation(tmp_path: Path, pooling: dict[str, Any], kind: Any) -> None:
    assert read_pooling(write(tmp_path, pooling), {}) == PoolingSpec(kind=kind, normalize=True)
    assert read_pooling(tmp_path, {"pooling_type": "last", "normalize": False}) == PoolingSpec(
        kind="last", normalize=False
    )


def test_without_a_module_that_normalises_vectors_are_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, {"pooling_mode_mean_tokens": True}, "Transformer", "Pooling")
    assert read_pooling(tmp_path, {}) == PoolingSpec(kind="mean", normalize=False)


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ({"pooling_mode_max_tokens": True}, "pools by max; there are cls, mean, last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pools by cls and mean"),
        ({}, "pools by nothing"),
    ],
)
def test_pooling_that_is_not_there_is_refused(tmp_path: Path, pooling: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_pooling(write(tmp_path, pooling), {})


def test_a_module_that_would_change_vectors_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"pooling_mode_cls_token": True}, "Transformer", "Pooling", "Dense")
    with pytest.raises(CheckpointError, match="has a module Dense"):
        read_pooling(tmp_path, {})


@pytest.mark.parametrize("path", ["/etc", "../other", "1_Pooling/../../other"])
def test_a_module_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling", "path": path}]))
    with pytest.raises(CheckpointError, match="a module in another folder"):
        read_pooling(tmp_path, {})


@pytest.mark.parametrize("text", ["{", "{}", '[{"type": 1}]', "[1]", '{"a": 1}', "[" * 200_000])
def test_a_damaged_list_of_modules_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match="modules"):
        read_pooling(tmp_path, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pooling": "cls"}, "has no 'pooling'"),
        ({"pooling_type": "STEP"}, "one of cls, mean, last"),
        ({"pooling_type": 1}, "one of cls"),
        ({"normalize": "yes"}, "true or false"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_pooling(tmp_path, options)
