"""Files for each load format that reads other than common ones, for `ferrule plugins check` and tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule_plugins.load_format.mistral import renamed

if TYPE_CHECKING:
    import torch


def _consolidated(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(weights), str(folder / "consolidated.safetensors"))


MISTRAL = {"writers": (_consolidated,), "name_of": staticmethod(renamed)}


def _whole(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(weights), str(folder / "model.safetensors"))


def _pickled(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    import torch

    torch.save(dict(weights), folder / "pytorch_model.bin")


def _state(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(weights), str(folder / "model-rank-0-part-0.safetensors"))


SAFETENSORS = {"writers": (_whole,)}
SHARDED = {"writers": (_state,)}
EITHER = {"writers": (_whole, _pickled)}
PICKLED = {"writers": (_pickled,)}
