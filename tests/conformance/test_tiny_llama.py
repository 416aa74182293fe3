"""The checkpoint `llama` of the test kit is written without transformers, and is what transformers would write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrule_testkit.checkpoints import tiny_checkpoint, tiny_model


def test_it_is_what_transformers_writes(tmp_path: Path) -> None:
    for seed in (None, 3):
        ours, theirs = tiny_checkpoint("llama", tmp_path / f"ours-{seed}", seed=seed), tmp_path / f"theirs-{seed}"
        model: Any = tiny_model("llama", seed)
        model.save_pretrained(theirs)
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        config, wanted = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
        assert config == {name: value for name, value in wanted.items() if name != "transformers_version"}


def test_it_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    assert (tiny_checkpoint("llama", tmp_path / "llama") / "model.safetensors").exists()
    with pytest.raises(ImportError):
        tiny_checkpoint("mistral", tmp_path / "mistral")
