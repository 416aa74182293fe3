"""`ferrule pack --format tensorizer`: a checkpoint's tensors, as they are, in one file of CoreWeave's tensorizer."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ferrule import __version__
from ferrule.assembly.choose import Chooser
from ferrule.assembly.model import outline
from ferrule.config import Resolved
from ferrule.errors import ConfigError
from ferrule.interfaces.plugins import Plugins
from ferrule.small_files import read_json
from ferrule_plugins.command.folder import copy_others
from ferrule_plugins.load_format.dummy import Dummy
from ferrule_plugins.load_format.gguf import Gguf
from ferrule_plugins.load_format.tensorizer import SINGLE
from ferrule_plugins.tensorizer import crypt
from ferrule_plugins.tensorizer.write import supported, write_each

FORMAT = "tensorizer"
_CONFIG, _MADE_BY = "config.json", "packed_by"


@dataclass(frozen=True)
class Key:
    """Of an encrypted file: `new` where none was in the key file, which is written beside the model."""

    file: Path
    value: bytes
    new: bool

    @classmethod
    def of(cls, file: Path) -> Key:
        """The key in a file, or a new one for a file that is not there. Raises ConfigError."""
        crypt.require()
        new = not file.exists()
        return cls(file, secrets.token_bytes(crypt.KEY_BYTES) if new else crypt.read_key(file), new)

    def save(self) -> None:
        """Write a new key to a file that only its owner can read. Raises ConfigError."""
        if not self.new:
            return
        try:
            with os.fdopen(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(self.value)
        except OSError as error:
            raise ConfigError(f"The key file {self.file} cannot be written: {error.strerror}.") from None


def write_tensors(folder: Path, config: Resolved, plugins: Plugins, key: Key | None) -> int:
    """How many bytes. Tensors have the names that a load format gives them. Raises StartupError, OSError."""
    chooser = Chooser(plugins)
    choice, model = outline(config, chooser)
    source = chooser.weight_format(config)()
    if isinstance(source, (Gguf, Dummy)):
        raise ConfigError(f"--format {FORMAT} writes a checkpoint's tensors, and this model has none of its own.")
    place, options = Path(config.model.model), {**choice.load_options, "use_tqdm_on_load": False}
    forms = {name: _form(name, tensor) for name, tensor in source.tensors(place, model, options)}
    size = sum(form.nbytes for form in forms.values())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.2f} GB of free space, and {size / 1e9:.2f} GB are to be written.",
            "--output FOLDER names another place.",
        )
    copy_others(place, folder)
    tensors = source.tensors(place, model, choice.load_options)
    write_each(folder / SINGLE, tensors, forms, None if key is None else key.value)
    stated = {**read_json(place / _CONFIG), _MADE_BY: f"ferrule {__version__}"}
    (folder / _CONFIG).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    if key is not None:
        key.save()
    return size


def _form(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not supported(tensor):
        raise ConfigError(f"--format {FORMAT}: {name} is of {tensor.dtype}, which the format does not have.")
    return torch.empty_like(tensor, device="meta")


def further(key: Key | None) -> str:
    """Options that a server of the folder needs."""
    if key is None:
        return ""
    return " --model-loader-extra-config " + shlex.quote(json.dumps({"encryption_keyfile": str(key.file)}))


def was_written(folder: Path) -> bool:
    """Whether `write_tensors` wrote what is there. Raises CheckpointError."""
    return (folder / SINGLE).is_file() and str(read_json(folder / _CONFIG).get(_MADE_BY, "")).startswith("ferrule ")
