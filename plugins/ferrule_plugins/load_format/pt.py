"""`pt`: PyTorch's own format (.bin, .pt), one file or shards with an index.

These files are pickles. They are read with the restricted unpickler only, which builds tensors and plain containers and
calls nothing else; a file that asks for more is refused, and there is no second try without the restriction.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrule.errors import CheckpointError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model
from ferrule_plugins.load_format.safetensors import Safetensors
from ferrule_plugins.load_format.shards import check_index, known_options, missing_file, progress, weight_files

if TYPE_CHECKING:
    import torch

_SINGLE = "pytorch_model.bin"
_SAFE_TORCH = (2, 6)  # before it, the restricted unpickler could be escaped (CVE-2025-32434)


class PyTorchFiles(WeightSource):
    patterns = ("*.bin", "*.pt", "*.bin.index.json")

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

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        known_options(options)
        files = [] if folder is None else self.files(folder, options.get("ignore_patterns", ()))
        if folder is None or not files:
            raise CheckpointError(
                f"{folder} has no .bin or .pt file.", "--load-format safetensors reads the other kind."
            )
        contents = {file: read_file(file) for file in files}  # mapped, not read: costs address space only
        check_index(folder, _SINGLE, contents)
        total = sum(tensor.nbytes for content in contents.values() for tensor in content.values())
        with progress(options, total) as bar:
            for file in files:
                self.place = str(file)
                for name, tensor in contents.pop(file).items():
                    yield name, tensor
                    bar.update(tensor.nbytes)
        self.place = str(folder)


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of one file. Raises CheckpointError naming the file, and the entry that is not a dense tensor."""
    import torch

    check_torch(torch.__version__)
    if not file.is_file():
        raise missing_file(file)
    try:
        mapped = zipfile.is_zipfile(file)
        if mapped:
            _check_stored(file)
        # files older than torch 1.6 are not zip archives and cannot be mapped
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(
            f"{file} was refused: it is damaged, or it holds more than tensors ({type(error).__name__}).",
            "Only plain tensors are loaded from pickle files; convert the model to safetensors if you trust it.",
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__} where tensors by name are expected.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(f"{file}: the entry {name!r} is not a dense tensor.")
        if value.device.type != "cpu" or value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{file}: the entry {name!r} has fewer bytes than its shape {tuple(value.shape)} needs."
            )
    return {name: value.detach() for name, value in content.items()}


def _check_stored(file: Path) -> None:
    """Raise ValueError for a compressed archive: torch writes none, and a small one may unpack to any size."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename!r} is compressed")


def check_torch(version: str) -> None:
    """Refuse a torch whose restricted unpickler can be escaped. Raises CheckpointError."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _SAFE_TORCH:
        raise CheckpointError(
            f"torch {version} cannot load pickle files safely; 2.6 or later can.", "Upgrade torch, or use safetensors."
        )
