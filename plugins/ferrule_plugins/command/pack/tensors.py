"""`ferrule pack --format NAME`: a checkpoint's tensors, as they are, in files that a load format writes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule import __version__
from ferrule.assembly.choose import PluginChooser
from ferrule.assembly.model import outline
from ferrule.config import Resolved
from ferrule.errors import ConfigError
from ferrule.interfaces.load_format import WritesWeights
from ferrule.interfaces.plugins import Plugins
from ferrule.small_files import read_json
from ferrule_files.folder import copy_others
from ferrule_files.safetensors_writer import SINGLE
from ferrule_files.shards import weight_files
from ferrule_plugins.load_format.dummy import Dummy
from ferrule_plugins.load_format.gguf import Gguf

_CONFIG, _MADE_BY = "config.json", "packed_by"


def writer_of(name: str, plugins: Plugins) -> type[WritesWeights]:
    """Return the load format of that name. Raises PluginError, and ConfigError for one that cannot be written."""
    found: type = plugins.load("load_format", name)
    if not issubclass(found, WritesWeights):
        raise ConfigError(f"--format {name}: this load format is read, and cannot be written.")
    return found


def write_tensors(
    folder: Path, config: Resolved, plugins: Plugins, name: str, options: Mapping[str, Any]
) -> tuple[int, Mapping[str, Any]]:
    """Write the folder; return its number of bytes of tensors, and the `--model-loader-extra-config` that a server
    needs.

    Tensors have the names that a load format gives them. Raises StartupError, OSError.
    """
    writer, chooser = writer_of(name, plugins), PluginChooser(plugins)
    choice, model = outline(config, chooser)
    source = chooser.weight_format(config)()
    if isinstance(source, (Gguf, Dummy)):
        raise ConfigError(f"--format {name} writes a checkpoint's tensors, and this model has none of its own.")
    place, hidden = Path(config.model.model), {**choice.load_options, "use_tqdm_on_load": False}
    forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in source.tensors(place, model, hidden)}
    size = sum(form.nbytes for form in forms.values())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.2f} GB of free space, and {size / 1e9:.2f} GB are to be written.",
            "--output FOLDER names another place.",
        )
    copy_others(place, folder)
    needed = writer.write(folder, forms, source.tensors(place, model, choice.load_options), **options)
    stated = {**read_json(place / _CONFIG), _MADE_BY: f"ferrule {__version__}"}
    (folder / _CONFIG).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    return size, needed


def further(needed: Mapping[str, Any]) -> str:
    """Return the options that a server of the folder needs."""
    return f" --model-loader-extra-config {shlex.quote(json.dumps(dict(needed)))}" if needed else ""


def was_written(folder: Path) -> bool:
    """Return whether `write_tensors` wrote the files in the folder. Raises CheckpointError."""
    ours = str(read_json(folder / _CONFIG).get(_MADE_BY, "")).startswith("ferrule ")
    return ours and not weight_files(folder, ".safetensors", SINGLE)
