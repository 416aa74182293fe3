"""`--verify-weights`: digests from a list, from the names of the hub's cache, and what is wrong with a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule.assembly.integrity import SUMS, verify
from ferrule.errors import CheckpointError

WEIGHTS = b"weights" * 1000
CONFIG = b"{}"


def listed(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_bytes(CONFIG)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in folder.iterdir()]
    (folder / SUMS).write_text("".join([*lines, f"{hashlib.sha256(b'').hexdigest()} *{SUMS}\n"]))
    return folder


def cached(folder: Path) -> Path:
    """Write a model as the hub's cache has it."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    snapshot = folder / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    names = {
        "model.safetensors": (WEIGHTS, hashlib.sha256(WEIGHTS).hexdigest()),
        "config.json": (CONFIG, hashlib.sha1(b"blob 2\0" + CONFIG).hexdigest()),
    }
    for name, (content, digest) in names.items():
        (blobs / digest).write_bytes(content)
        (snapshot / name).symlink_to(blobs / digest)
    return snapshot


def linked(folder: Path) -> Path:
    """Write a model as a GGUF file is served: from a folder with a link to it."""
    files = listed(folder)
    (folder / "link").mkdir()
    (folder / "link" / "model.safetensors").symlink_to(files / "model.safetensors")
    (folder / "link" / "config.json").write_text("{}")  # described by the file
    return folder / "link"


@pytest.mark.parametrize("make", [listed, cached, linked])
def test_one_bit_of_a_file(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "model")
    verify(folder)
    file = (folder / "model.safetensors").resolve()
    changed = bytearray(WEIGHTS)
    changed[1234] ^= 4
    file.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors in .* is not the file"):
        verify(folder)


@pytest.mark.parametrize("make", [listed, cached])
def test_configuration_counts(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "model")
    (folder / "config.json").resolve().write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        verify(folder)


def test_what_a_folder_may_lack(tmp_path: Path) -> None:
    folder = listed(tmp_path / "model")
    (folder / "other.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no digest of other\.bin"):
        verify(folder)
    (folder / "other.bin").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks config\.json"):
        verify(folder)
    (folder / SUMS).write_text("abc  model.safetensors\n")
    with pytest.raises(CheckpointError, match="line 1"):
        verify(folder)
    (folder / SUMS).write_text(f"{'0' * 64}  ../model.safetensors\n")
    with pytest.raises(CheckpointError, match="line 1"):
        verify(folder)
    (folder / SUMS).unlink()
    with pytest.raises(CheckpointError, match="sha256sum"):
        verify(folder)
