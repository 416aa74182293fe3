"""A model folder for files that describe themselves: the one seam for configuration, tokenizer, weights in one file.

Everything behind it reads folders. The texts that such a file stands for are written to a folder in the user's cache,
named by what is in them, with links to the files.

A GGUF file is configuration, tokenizer, weights and quantization at once. The load format whose file it is gives the
texts that a folder would have (`WeightSource.describe`). No other module knows of such files, and no text is made
twice. A folder whose configuration alone has another form, such as Mistral's ``params.json``, stays as it is: a load
format states that file's name and translates it (`WeightSource.configuration`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from ferrule.env import caches
from ferrule.errors import CheckpointError, PluginError
from ferrule.interfaces.load_format import Description, WeightSource
from ferrule.interfaces.plugins import Plugins


def described(what: str, place: Path, load_format: str, plugins: Plugins) -> Path:
    """Return a folder with a ``config.json`` for the model or tokenizer at `place`: `place` itself, unless its files
    describe the model.

    A folder's own ``config.json`` takes precedence, unless `load_format` names the format that describes. Raises
    CheckpointError for a file that no format describes, and what `WeightSource.describe` raises.
    """
    if place.is_dir() and load_format == "auto" and (place / "config.json").is_file():
        return place
    names = plugins.defaults("load_format") if load_format == "auto" else (load_format,)
    for name in names:
        try:
            cls: type[WeightSource] = plugins.load("load_format", name)
        except PluginError:
            if load_format != "auto":
                raise
            continue  # one of several, whose library may be missing
        if not _takes(cls, place):
            continue
        with plugins.blamed("load_format", name):
            found = cls.describe(place)
        if found is not None:
            return _written(place, found)
    if place.is_file():
        raise CheckpointError(
            f"{place} is a file; the {what} must be a folder, a file that describes itself, or a hub id.",
            f"Name {place.parent}?",
        )
    return place


def _takes(cls: type[WeightSource], place: Path) -> bool:
    if place.is_dir():
        return cls.refuses(place) is None
    patterns = (pattern for form in cls.forms or () for pattern in ((form,) if isinstance(form, str) else form))
    return any(fnmatch(place.name, pattern) for pattern in patterns)


def _written(place: Path, found: Description) -> Path:
    """Write a description to a folder of the cache. Raises CheckpointError where the folder cannot be written."""
    weights = [file.resolve() for file in found.weights]
    digest = hashlib.sha256()
    for part in (
        *(text for item in sorted(found.texts.items()) for text in (item[0].encode(), item[1])),
        *map(bytes, weights),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    name = place.stem if place.is_file() else place.name
    folder = Path(caches()) / "described" / f"{name}-{digest.hexdigest()[:16]}"
    try:
        if not folder.is_dir():
            _write(folder, found, weights)
        owner = folder.stat()
    except OSError as error:
        raise CheckpointError(
            f"What {place} says of the model cannot be written to {folder}: {error.strerror}.",
            "XDG_CACHE_HOME names another folder for caches.",
        ) from None
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise CheckpointError(f"{folder} may be written to by others.", "Remove it, and start again.")
    return folder


def _write(folder: Path, found: Description, weights: list[Path]) -> None:
    """Write beside the folder, and rename: one process that is cut off, or two at a time, leave no half folder. Raises
    OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, text in found.texts.items():
            (scratch / name).write_bytes(text)
        for file, target in zip(found.weights, weights, strict=True):
            (scratch / file.name).symlink_to(target)
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
