"""`npcache`: PyTorch files, and beside them a copy of their tensors, which is mapped instead of read.

The copy is the folder `np`: `weight_names.json`, a list of names, and for each tensor a file in numpy's format that has
its name. Numpy has no bfloat16: such tensors are kept as 16-bit integers. `ferrule.json` lists them, and the files that
the copy was made of, so that it is made anew when these change. A copy without `ferrule.json`, which another program
made, is taken as it is.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ferrule.errors import CheckpointError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule.small_files import read_json
from ferrule_files.locations import OPTION
from ferrule_files.shards import is_file_name, known_options, progress
from ferrule_plugins.load_format.pt import PyTorchFiles

if TYPE_CHECKING:
    import torch

_SOURCES = ("*.bin", "*.pt", "*.bin.index.json")  # of the copy
_FOLDER, _NAMES, _ORIGIN = "np", "weight_names.json", "ferrule.json"
_MAX_NAMES = 64 << 20  # bytes
_SMALL = 4096  # bytes
# What numpy raises for a header, which it reads as Python's own literals.
_DAMAGED = (OSError, ValueError, TypeError, EOFError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)


class NumpyCache(WeightSource):
    forms = (("*.bin", "*.pt"),)
    conformance = "ferrule_testkit.samples.load_format:PICKLED"

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "used only when it is asked for by name"

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> None:
        """Return None: the shapes are not known before the cache exists. Raises where there is nothing to make it
        from.
        """
        if folder is None or not _is_of(folder / _FOLDER, _sources(folder, options.get("ignore_patterns", ()))):
            PyTorchFiles().shapes(folder, {**options, OPTION: {}})

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        known_options(options)
        if folder is None:
            raise CheckpointError("--load-format npcache: the model has no folder.")
        cache, sources = folder / _FOLDER, _sources(folder, options.get("ignore_patterns", ()))
        if not _is_of(cache, sources):
            of_host = {**options, OPTION: {}}  # numpy's arrays are in its memory
            _renew(cache, sources, partial(PyTorchFiles().tensors, folder, model, of_host))
        integers = _integers(cache)
        files = [cache / name for name in _names(cache)]
        with progress(options, sum(file.stat().st_size for file in files if file.is_file())) as bar:
            for file in files:
                self.place = str(file)
                tensor = _load(file, file.name in integers)
                yield file.name, tensor
                bar.update(file.stat().st_size)
        self.place = str(folder)


def _sources(folder: Path, ignore: Sequence[str]) -> dict[str, list[int]]:
    """Return size and time of change, in nanoseconds, of each file that the copy may be made of."""
    found = (file for pattern in _SOURCES for file in folder.glob(pattern))
    wanted = {file.name for file in PyTorchFiles.files(folder, ignore)}
    files = [file for file in found if file.name in wanted or file.suffix == ".json"]
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)}


def _origin(cache: Path) -> dict[str, Any] | None:
    """Return the origin of the copy; empty where its maker did not record one, None where there is no copy."""
    if not (cache / _NAMES).is_file():
        return None
    return read_json(cache / _ORIGIN) if (cache / _ORIGIN).is_file() else {}


def _integers(cache: Path) -> frozenset[str]:
    """Return the names of the tensors that are stored as 16-bit integers."""
    names = (_origin(cache) or {}).get("bfloat16", [])
    if not isinstance(names, list):
        raise CheckpointError(f"{cache / _ORIGIN}: 'bfloat16' is not a list of names.", _hint(cache))
    return frozenset(name for name in names if isinstance(name, str))


def _is_of(cache: Path, sources: Mapping[str, Any]) -> bool:
    """Return whether there is a copy, and it was made of these files."""
    origin = _origin(cache)
    return origin is not None and origin.get("sources", sources) == sources


def _names(cache: Path) -> list[str]:
    file = cache / _NAMES
    try:
        names = json.loads(file.read_bytes()) if file.stat().st_size <= _MAX_NAMES else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.", _hint(cache)) from None
    if not isinstance(names, list):
        raise CheckpointError(f"{file} holds no list of names.", _hint(cache))
    return [_checked(name) for name in names]


def _checked(name: Any) -> str:
    """Return a tensor's name, which becomes a file's. Raises CheckpointError for a name that cannot."""
    if not is_file_name(name) or name in {_NAMES, _ORIGIN}:
        raise CheckpointError(f"--load-format npcache: {name!r} cannot be the name of a file.", "--load-format pt")
    return str(name)


def _load(file: Path, bfloat16: bool) -> torch.Tensor:
    """Map a file as a tensor, which its user copies. Raises CheckpointError that names the file."""
    import torch

    try:
        _check_header(file, np.dtype(np.int16) if bfloat16 else None)
        mapped: Literal["c"] | None = "c" if file.stat().st_size > _SMALL else None  # nothing cannot be mapped
        array = np.load(file, mmap_mode=mapped, allow_pickle=False)
        tensor = torch.from_numpy(array)
    except _DAMAGED as error:
        raise CheckpointError(f"{file} cannot be read: {error}.", _hint(file.parent)) from None
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def _check_header(file: Path, expected: np.dtype[Any] | None) -> None:
    """Raise ValueError where a file is not as long as its shape says, before numpy allocates that shape."""
    with file.open("rb") as stream:
        first = np.lib.format.read_magic(stream) == (1, 0)  # type: ignore[no-untyped-call]
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)  # type: ignore[no-untyped-call]
        size = file.stat().st_size - stream.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"shape {shape} and type {dtype} do not fit its {size} bytes")
    if expected is not None and dtype != expected:
        raise ValueError(f"its type is {dtype}, not {expected}")


def _renew(cache: Path, sources: Mapping[str, Any], tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
    """Write the copy beside its final place, and then move it there: an incomplete copy is never found.

    One process writes it, and others wait for that.
    """
    unfinished = cache.with_name(".np")
    try:
        with cache.with_name(".np.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_of(cache, sources):
                return
            for old in (unfinished, cache):
                if old.is_dir():
                    shutil.rmtree(old)
            _write(unfinished, sources, tensors())
            unfinished.rename(cache)
    except OSError as error:
        raise CheckpointError(f"{cache} cannot be written: {error.strerror}.", "--load-format pt") from None


def _write(cache: Path, sources: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    import torch

    cache.mkdir()
    names, integers = [], []
    for name, tensor in tensors:
        names.append(_checked(name))
        if tensor.dtype == torch.bfloat16:
            integers.append(name)
            tensor = tensor.view(torch.int16)
        with (cache / name).open("wb") as file:
            np.save(file, tensor.contiguous().numpy(), allow_pickle=False)
    (cache / _ORIGIN).write_text(json.dumps({"sources": sources, "bfloat16": integers}))
    (cache / _NAMES).write_text(json.dumps(names))


def _hint(cache: Path) -> str:
    return f"Remove {cache}: it is made anew."
