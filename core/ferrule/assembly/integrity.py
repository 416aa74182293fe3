"""`--verify-weights`: the files of a model's folder are what somebody has said that they are.

Known digests are those of a file SHA256SUMS in the folder, as ``sha256sum * > SHA256SUMS`` writes it, and the names
that the cache of the Hugging Face hub gives to files: SHA-256 for large ones, git's SHA-1 of a blob for others. A bit
that flipped in a weight changes answers and nothing else, so only a digest can tell.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.log import Log
from ferrule.small_files import read_small

SUMS = "SHA256SUMS"
_MAX_SUMS = 1 << 20  # bytes
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64})[ ][ *](?P<name>[^\\/\0]+)")
_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_PIECE = 1 << 20  # bytes

_log = Log("worker")


def verify(folder: Path) -> None:
    """Check the digests of the files in a folder.

    Raises CheckpointError for a file with another digest, for a missing file, and for weights whose digest is not
    known.
    """
    start = time.monotonic()
    known = dict(_known(folder))
    missing = sorted(name for name in _sums(folder) if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"--verify-weights: {folder} lacks {', '.join(missing[:5])}, which {SUMS} lists.")
    unknown = sorted(
        file.name for file in folder.iterdir() if file.suffix in _WEIGHTS and file.is_file() and file.name not in known
    )
    if unknown or not known:
        what = ", ".join(unknown[:5]) or "any file"
        raise CheckpointError(
            f"--verify-weights: no digest of {what} is known in {folder}.",
            f"Write them where the files can be trusted: sha256sum * > {SUMS}",
        )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing leaves the interpreter to others
        digests = dict(zip(known, pool.map(lambda name: _digest(folder / name, known[name]), known), strict=True))
    wrong = sorted(name for name, digest in digests.items() if digest != known[name])
    if wrong:
        raise CheckpointError(
            f"--verify-weights: {', '.join(wrong[:5])} in {folder} is not the file whose digest is known.",
            "It is damaged or was changed: fetch it again.",
        )
    size = sum((folder / name).stat().st_size for name in known)
    _log.info("files verified", files=len(known), bytes=size, seconds=round(time.monotonic() - start, 1))


def _known(folder: Path) -> Iterator[tuple[str, str]]:
    """Return the names of the files with their digests."""
    listed = _sums(folder)
    for file in folder.iterdir():
        if file.name in listed:
            yield file.name, listed[file.name]
        elif file.is_symlink() and _BLOB.fullmatch(name := file.resolve().name):
            yield file.name, name
        elif file.is_symlink() and (digest := _sums(file.resolve().parent).get(file.resolve().name)):
            yield file.name, digest  # a GGUF file, to which its folder in the cache has a link


def _sums(folder: Path) -> Mapping[str, str]:
    try:
        text = read_small(folder / SUMS, _MAX_SUMS, "list of digests").decode("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / SUMS} cannot be read: {error}.") from None
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{folder / SUMS}, line {number}: expected a SHA-256, two spaces and a file name.")
        if match["name"] != SUMS:  # `sha256sum *` may have seen it, still empty
            found[match["name"]] = match["digest"].lower()
    return found


def _digest(file: Path, expected: str) -> str:
    try:
        with file.open("rb") as stream:
            if len(expected) == 64:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            blob = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
            while piece := stream.read(_PIECE):
                blob.update(piece)
            return blob.hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
