"""`pt`: PyTorch's own format (.bin, .pt), one file or shards with an index.

These files are pickles. They are read with the restricted unpickler only, which builds tensors and plain containers and
calls nothing else; a file that asks for more is refused, and is never read without the restriction. Files of
HQQ have dictionaries of tensors: see `ferrule_plugins.load_format.hqq_file`.
"""

from __future__ import annotations

import mmap
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from ferrule.errors import CheckpointError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule_files.locations import Locations
from ferrule_files.safetensors import large_first
from ferrule_files.shards import check_index, known_options, missing_file, progress, weight_files
from ferrule_plugins.load_format.pickles import check_tuples
from ferrule_plugins.load_format.safetensors import Safetensors

if TYPE_CHECKING:
    import torch

_SINGLE = "pytorch_model.bin"
_COUNTS = "sparse_threshold."  # before names of layers: numbers that SqueezeLLM keeps beside its tensors
_PICKLES = 5  # in a file before torch 1.6
_SAFE_TORCH = (2, 6)  # before it, the restricted unpickler could be escaped (CVE-2025-32434)


class PyTorchFiles(WeightSource):
    forms = (("*.bin", "*.pt"),)
    fetch_order = -2

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        if folder is None:
            return "the model has no folder"
        if not cls.files(folder):
            return f"{folder} has no .bin or .pt file"
        safer = Safetensors.refuses(folder) is None
        return "the folder has .safetensors files too, which cannot hold code" if safer else None

    @classmethod
    def files(cls, folder: Path, ignore: Sequence[str] = ()) -> list[Path]:
        return weight_files(folder, ".bin", _SINGLE, ignore) or weight_files(folder, ".pt", "model.pt", ignore)

    def shapes(self, folder: Path | None, options: Mapping[str, Any]) -> None:
        """Return None: the shapes are in the pickles. Raises where there is no file."""
        self._wanted(folder, options)

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from ferrule_kernels.cpu.pages import drop_file_pages

        locations = Locations(options)
        folder, files = self._wanted(folder, options)
        contents = {file: read_file(file, locations) for file in files}  # mapped, not read: costs address space only
        check_index(folder, _SINGLE, contents)
        total = sum(tensor.nbytes for content in contents.values() for tensor in content.values())
        with progress(options, total) as bar:
            for file in files:
                self.place = str(file)
                content, mapped = contents.pop(file), is_mapped(file)
                for name in large_first({name: tensor.nbytes for name, tensor in content.items()}):
                    tensor = content[name]
                    yield name, locations.put(tensor)
                    bar.update(tensor.nbytes)
                    if mapped:  # pages that were read count as this process's otherwise
                        drop_file_pages(tensor)
        self.place = str(folder)

    def _wanted(self, folder: Path | None, options: Mapping[str, Any]) -> tuple[Path, list[Path]]:
        """Return the folder, and its files to read. Raises CheckpointError where there are none."""
        known_options(options)
        files = [] if folder is None else self.files(folder, options.get("ignore_patterns", ()))
        if folder is None or not files:
            raise CheckpointError(
                f"{folder} has no .bin or .pt file.", "--load-format safetensors reads the other kind."
            )
        return folder, files


def read_file(file: Path, locations: Locations | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors of one file, on the CPU; `locations` learns where they were saved.

    Raises CheckpointError naming the file, and the entry that is not a dense tensor.
    """
    from ferrule_plugins.load_format import hqq_file

    content = entries(file, locations)
    return hqq_file.tensors(content) if hqq_file.is_hqq(content) else _checked(file, content)


def entries(file: Path, locations: Locations | None = None) -> dict[Any, Any]:
    """Read the entries of one file by name, mapped: tensors, and what else the restricted unpickler makes. Raises
    CheckpointError.
    """
    import torch

    check_torch(torch.__version__)
    if not file.is_file():
        raise missing_file(file)
    try:
        if zipfile.is_zipfile(file):
            _check_archive(file)
        else:
            _check_pickles(file)
        where = locations.note if locations is not None and locations.needed else "cpu"
        content = torch.load(file, map_location=where, weights_only=True, mmap=is_mapped(file))
    except Exception as error:
        raise CheckpointError(
            f"{file} was refused: it is damaged, or it holds more than tensors ({type(error).__name__}).",
            "Only plain tensors are loaded from pickle files; convert the model to safetensors if you trust it.",
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__} where tensors by name are expected.")
    return content


def _checked(file: Path, content: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    import torch

    content = {name: value for name, value in content.items() if not (type(value) is int and _is_count(name))}
    for name, value in content.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{file} has an entry whose name is of the type {type(name).__name__}.")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(f"{file}: the entry {name!r} is not a dense tensor.")
        if value.is_meta or value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{file}: the entry {name!r} has fewer bytes than its shape {tuple(value.shape)} needs."
            )
    return {name: value.detach() for name, value in content.items()}


def _is_count(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(_COUNTS)


def is_mapped(file: Path) -> bool:
    """Return whether a file can be mapped: files older than torch 1.6 are not zip archives, and cannot.

    Numbers of the other byte order are turned in memory, which then differs from the file.
    """
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        orders = [entry for entry in archive.infolist() if entry.filename.endswith("/byteorder")]
        return all(
            entry.file_size == len(sys.byteorder) and archive.read(entry) == sys.byteorder.encode() for entry in orders
        )


def _check_archive(file: Path) -> None:
    """Raise an error for a compressed archive, or for tuples that take endless time.

    torch compresses nothing, and a small archive may unpack to any size.
    """
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename!r} is compressed")
            if entry.filename.lower().endswith("data.pkl"):  # torch does not tell capital letters apart
                with archive.open(entry) as stream:
                    check_tuples(stream)


def _check_pickles(file: Path) -> None:
    """Check a file from before torch 1.6 like `_check_archive`: a magic number, versions, the tensors and their
    storages.
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for _ in range(_PICKLES):
            check_tuples(cast("IO[bytes]", content))


def check_torch(version: str) -> None:
    """Refuse a torch whose restricted unpickler can be escaped. Raises CheckpointError."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _SAFE_TORCH:
        raise CheckpointError(
            f"torch {version} cannot load pickle files safely; 2.6 or later can.", "Upgrade torch, or use safetensors."
        )
