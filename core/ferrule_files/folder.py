"""Folders that a command writes: all of one or nothing, and what they take over from the model's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ferrule.errors import CheckpointError, ConfigError

_CONFIG = "config.json"
_COPIED = frozenset(
    {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md"}
)  # files that are copied beside the weights
_TOKENIZER = "tokenizer.model.v"
_TEMPLATES = "additional_chat_templates"
_LICENSES = ("LICENSE", "NOTICE")


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """Yield a folder that replaces `out` when the block succeeds, and is removed when it fails. Raises ConfigError."""
    folder = out.parent / f".{out.name}.{os.getpid()}.part"
    old = out.parent / f".{out.name}.{os.getpid()}.old"
    try:
        folder.mkdir(parents=True)
        yield folder
        if out.exists():
            out.rename(old)
        folder.rename(out)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out} cannot be written: {error.strerror or error}.", "--output FOLDER names a place."
        ) from error
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        for left in (folder, old):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def beside_file(out: Path) -> Iterator[Path]:
    """Do for one file what `beside` does for a folder; its ending stays the same. Raises ConfigError."""
    file = out.parent / f".{out.stem}.{os.getpid()}.part{out.suffix}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield file
        file.replace(out)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out} cannot be written: {error.strerror or error}.", "--output FILE names a place."
        ) from error
    finally:
        file.unlink(missing_ok=True)


def copy_others(source: Path, folder: Path) -> None:
    """Copy the files that are not weights: tokenizer, chat templates, defaults of generation, code, licenses.

    Raises CheckpointError for a link to a file outside of the model: the source may come from anyone, and the copy may
    be shared.
    """
    files = [file for file in sorted(source.iterdir()) if file.name != _CONFIG and _is_wanted(file)]
    templates = source / _TEMPLATES
    files += [file for file in sorted(templates.glob("*.jinja")) if file.is_file()]
    for file in files:
        if not _is_own(file, source):
            raise CheckpointError(
                f"{file} is a link to {file.resolve()}, which does not belong to the model.",
                "Replace the link with the file.",
            )
        place = folder / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)


def _is_wanted(file: Path) -> bool:
    kind = file.with_suffix("") if file.name.startswith(_TOKENIZER) else file  # Mistral's has a version behind it
    named = kind.suffix in _COPIED or file.name.upper().startswith(_LICENSES)
    return named and file.is_file() and not file.name.endswith(".index.json")


def _is_own(file: Path, source: Path) -> bool:
    """Return whether a file is in the folder; for a snapshot in a hub's cache, also whether it is among the blobs of
    the same repository.
    """
    at, root = file.resolve(), source.resolve()
    snapshot = root.parent.name == "snapshots"
    return at.is_relative_to(root) or snapshot and at.is_relative_to(root.parent.parent / "blobs")
