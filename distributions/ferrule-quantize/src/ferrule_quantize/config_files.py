"""The files beside the weights in a quantized checkpoint's folder: the index of several files, and the
configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ferrule import __version__
from ferrule.small_files import read_json
from ferrule_quantize.source import SINGLE

CONFIG, MARK = "config.json", "quantized_by"


def write_index(folder: Path, files: Mapping[str, Iterable[str]], size: int) -> None:
    """Write the index of a checkpoint; `files` are names of tensors by file name. Raises OSError."""
    places = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(source: Path, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Write the source's configuration with `quantization`. Raises CheckpointError, OSError."""
    values = {**read_json(source / CONFIG), "quantization_config": quantization, MARK: f"ferrule {__version__}"}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
