"""Whether a folder has an adapter for the served model, by the name that its configuration gives to its base model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.log import Log
from ferrule.small_files import read_json

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
BESIDE = (  # what an adapter that adds tokens has as well: their rows, and the tokenizer that names them
    *("new_embeddings.safetensors", "new_embeddings.bin"),
    *("*token*.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
)
_KEY = "base_model_name_or_path"
_log = Log("adapters")


def is_for(folder: Path, base_models: Collection[str]) -> bool:
    """Return whether the folder has an adapter of one of these models; the log tells of one for another model."""
    file = folder / CONFIG
    if not file.is_file():
        return False
    try:
        base = read_json(file).get(_KEY)
    except CheckpointError as error:
        _log.warning(str(error))
        return False
    if base in base_models:
        return True
    known = ", ".join(base_models)
    _log.warning(f"{folder} is passed over: its {_KEY} is {base!r:.120}, and the model is {known}")
    return False
