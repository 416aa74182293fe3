"""Files of other tools in the place of ``config.json``, and settings of quantization elsewhere: plugins state both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrule import checkpoint
from ferrule.errors import CheckpointError, ConfigError
from ferrule.plugin import Plugins
from tools.wheels import Distribution

SOURCE = """
from ferrule.errors import CheckpointError
from ferrule.interfaces.load_format import WeightSource

class Format(WeightSource):
    config_file = "acme.json"
    config_names = {"width": "hidden_size"}

    @classmethod
    def configuration(cls, stated, file):
        if "width" not in stated:
            raise CheckpointError(f"{file} has no 'width'.")
        return {"architectures": ["LlamaForCausalLM"], "hidden_size": stated["width"], **stated}

    @classmethod
    def refuses(cls, folder):
        return None

    def tensors(self, folder, model, options):
        return iter(())
"""
METHOD = """
raise RuntimeError("imported")

class Method:
    settings_elsewhere = {"acme_quant.json": "acme", "acme_compression": "older"}
"""
HF = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


@pytest.fixture
def plugins(site: Any) -> Plugins:
    entries = {
        "ferrule.v1.load_format": {"acme": "acme_form:Format"},
        "ferrule.v1.quantization": {"acme": "acme_q:Method"},
    }
    files = {"acme_form.py": SOURCE, "acme_q.py": METHOD}
    site.install(Distribution(name="acme-form", version="1", entry_points=entries, files=files))
    found: Plugins = site.discover()
    return found


def written(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_format_reads_a_configuration_of_its_own(tmp_path: Path, plugins: Plugins) -> None:
    folder = written(tmp_path, acme={"width": 32})
    assert checkpoint.read(folder, plugins=plugins)["hidden_size"] == 32
    with pytest.raises(CheckpointError, match=r"acme\.json: 'width' must be an integer"):
        checkpoint.read(written(tmp_path, acme={"width": -1}), plugins=plugins)
    with pytest.raises(CheckpointError, match="load_format:acme of acme-form 1: .*has no 'width'"):
        checkpoint.read(written(tmp_path, acme={}), plugins=plugins)


def test_config_json_comes_first_unless_the_option_names_the_format(tmp_path: Path, plugins: Plugins) -> None:
    folder = written(tmp_path, acme={"width": 32}, config=HF)
    for form, size in (("auto", 8), ("hf", 8), ("acme", 32)):
        assert checkpoint.read(folder, form=form, plugins=plugins)["hidden_size"] == size
    with pytest.raises(ConfigError, match="--config-format safetensors: no load format"):
        checkpoint.read(folder, form="safetensors", plugins=plugins)


def test_settings_of_quantization_are_found_without_an_import(tmp_path: Path, plugins: Plugins) -> None:
    folder = written(tmp_path, config=HF, acme_quant={"bits": 4})
    assert checkpoint.read(folder, plugins=plugins)["quantization_config"] == {"quant_method": "acme", "bits": 4}
    written(folder, config={**HF, "acme_compression": {"bits": 2, "quant_method": "own"}})
    (folder / "acme_quant.json").unlink()
    assert checkpoint.read(folder, plugins=plugins)["quantization_config"] == {"quant_method": "own", "bits": 2}
    written(folder, config={**HF, "quantization_config": {"quant_method": "fp8"}, "acme_compression": {"bits": 2}})
    assert checkpoint.read(folder, plugins=plugins)["quantization_config"] == {"quant_method": "fp8"}
    assert "acme_q" not in sys.modules
