"""The float checkpoint that is read: its files, and its tensors, mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ferrule.errors import CheckpointError
from ferrule_files.safetensors import read_header, read_tensors
from ferrule_files.shards import check_index, weight_files

SINGLE = "model.safetensors"
Sizes = Mapping[Path, dict[str, int]]


def file_sizes(source: Path) -> Sizes:
    """Return the files in their order, and the bytes of each one's tensors. Raises CheckpointError."""
    files = weight_files(source, ".safetensors", SINGLE)
    if not files:
        raise CheckpointError(f"{source} has no .safetensors file.", "Other formats cannot be quantized.")
    sizes = {file: read_header(file) for file in files}
    check_index(source, SINGLE, sizes)
    return sizes


def open_source(source: Path) -> dict[str, torch.Tensor]:
    """Map all tensors, which are not read until their numbers are needed. Raises CheckpointError."""
    return {name: tensor for file, sizes in file_sizes(source).items() for name, tensor in read_tensors(file, sizes)}


def check_finite(file: Path, name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor with numbers that are not finite."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise CheckpointError(f"{file}: the tensor {name!r} has numbers that are not finite (NaN or infinity).")
