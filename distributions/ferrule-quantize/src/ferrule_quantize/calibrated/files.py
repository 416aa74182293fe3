"""Writes files whose tensors come in any order: the headers first, then each tensor at its place."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import torch

from ferrule.errors import ConfigError
from ferrule_files.safetensors_writer import write_data, write_header

Forms = Mapping[str, Mapping[str, torch.Tensor]]


class Files:
    """The safetensors files of a folder; `forms` are their tensors by file name, on the meta device.

    Raises ConfigError where the files have no room, OSError.
    """

    def __init__(self, folder: Path, forms: Forms) -> None:
        self.num_bytes = sum(tensor.nbytes for tensors in forms.values() for tensor in tensors.values())
        free = shutil.disk_usage(folder).free
        if self.num_bytes > free:
            raise ConfigError(
                f"{folder.parent} has {free / 1e9:.2f} GB of free space; {self.num_bytes / 1e9:.2f} GB are needed."
            )
        self._open: list[IO[bytes]] = []
        self._places: dict[str, tuple[IO[bytes], int, torch.Tensor]] = {}
        for name, tensors in forms.items():
            stream = (folder / name).open("wb")
            self._open.append(stream)
            write_header(stream, tensors)
            place = stream.tell()
            for own, form in tensors.items():
                self._places[own] = stream, place, form
                place += form.nbytes
            stream.truncate(place)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        stream, place, form = self._places.pop(name)
        if (tensor.shape, tensor.dtype) != (form.shape, form.dtype):
            raise RuntimeError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, and {tuple(form.shape)} was promised")
        stream.seek(place)
        write_data(stream, tensor)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in self._open:
            stream.close()
        if kind is None and self._places:
            raise RuntimeError(f"tensors were not written: {', '.join(sorted(self._places)[:3])}")
