"""Weights in ``weights.npz``. NumPy has no bfloat16: such a tensor is stored by its bits, under ``NAME|bfloat16``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.load_format import WeightSource
from ferrule.interfaces.model import Model

FILE = "weights.npz"
_MARK = "|bfloat16"
_OPTIONS = {"use_tqdm_on_load", "ignore_patterns"}  # what every format is given


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    arrays: dict[str, Any] = {}
    for name, tensor in tensors.items():
        half = tensor.dtype is torch.bfloat16
        arrays[name + _MARK * half] = (tensor.view(torch.int16) if half else tensor).numpy()
    np.savez(folder / FILE, **arrays)


class ExampleFormat(WeightSource):
    forms = ("*.npz",)
    conformance = {"writers": (save,)}

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return None if folder and (folder / FILE).is_file() else f"there is no {FILE}"

    def tensors(
        self, folder: Path | None, model: Model, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if unknown := set(options) - _OPTIONS:
            raise ConfigError(f"--model-loader-extra-config: {sorted(unknown)} means nothing to this format.")
        if folder is None:
            raise CheckpointError("This format needs a folder.")
        file = folder / FILE
        try:
            with np.load(file) as arrays:
                for key in arrays.files:
                    tensor = torch.from_numpy(arrays[key])
                    self.place = str(file)
                    yield key.removesuffix(_MARK), tensor.view(torch.bfloat16) if key.endswith(_MARK) else tensor
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        self.place = str(folder)
