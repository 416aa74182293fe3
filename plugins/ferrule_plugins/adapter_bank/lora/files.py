"""The tensors of an adapter's folder: their names and shapes first, then one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from ferrule.errors import CheckpointError
from ferrule_files.safetensors import read_header, read_tensors, shapes
from ferrule_plugins.load_format.pt import read_file

FILES = ("adapter_model.safetensors", "adapter_model.bin")
ADDED_FILES = ("new_embeddings.safetensors", "new_embeddings.bin")
ADDED_ROWS = {"input_embeddings": "input_rows", "output_embeddings": "output_rows"}  # names in them, and their roles
_PREFIX = "base_model.model."
_ROLES = re.compile(
    r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|base_layer)"
    r"(?:\.default)?(?:\.(weight|bias))?"
)
_NAMES: Mapping[tuple[str, str | None], str] = {
    ("lora_A", "weight"): "down",
    ("lora_B", "weight"): "up",
    ("lora_B", "bias"): "up_bias",
    ("lora_embedding_A", None): "down",
    ("lora_embedding_B", None): "up",
    ("lora_magnitude_vector", None): "magnitude",
    ("lora_magnitude_vector", "weight"): "magnitude",
    ("base_layer", "bias"): "bias",
    ("base_layer", "weight"): "base",
}


@dataclass(frozen=True)
class Entry:
    """A tensor of an adapter: its name in the file, the module that it changes, and its role there.

    Roles: "down" and "up" are A and B, "up_bias" that of B, "magnitude" of DoRA, "bias" in the place of the model's,
    "base" the model's own weights, which PEFT saves of an embedding or a head, and does not train, with the rows of
    tokens that were added to the vocabulary. "input_rows" and "output_rows" are such rows alone.
    """

    source: str
    module: str  # as the model's checkpoint calls it
    role: str
    shape: tuple[int, ...]
    table: bool


@dataclass(frozen=True)
class AdapterFile:
    """An adapter's tensors: `entries` by name, and `read` goes through them."""

    entries: Mapping[str, Entry]
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]


def open_adapter(folder: Path) -> AdapterFile:
    """Read the names and shapes of an adapter's tensors. Raises CheckpointError, and OSError where files are gone."""
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} has neither {' nor '.join(FILES)}.")
    own = _opened(file, _entry)
    if not own.entries:
        raise CheckpointError("it has no tensors.")
    beside = next((folder / name for name in ADDED_FILES if (folder / name).exists()), None)
    if beside is None:
        return own
    more = _opened(beside, partial(_added_entry, beside.name))
    return AdapterFile({**own.entries, **more.entries}, lambda: chain(own.read(), more.read()))


def _opened(file: Path, entry: Callable[[str, tuple[int, ...]], Entry]) -> AdapterFile:
    """Open one file, whose tensors `entry` describes."""
    if file.suffix == ".safetensors":
        sizes = read_header(file)
        found = {name: shape for name, (shape, _) in shapes(file).items()}
        return AdapterFile(_entries(found, entry), lambda: read_tensors(file, sizes))
    content = read_file(file)
    found = {name: tuple(tensor.shape) for name, tensor in content.items()}
    return AdapterFile(_entries(found, entry), lambda: iter(content.items()))


def _entries(found: Mapping[str, tuple[int, ...]], entry: Callable[[str, tuple[int, ...]], Entry]) -> dict[str, Entry]:
    return {name: entry(name, shape) for name, shape in found.items()}


def _added_entry(file: str, source: str, shape: tuple[int, ...]) -> Entry:
    if source not in ADDED_ROWS:
        raise CheckpointError(f"{file} has the tensor {source!r:.200}; there are {' and '.join(ADDED_ROWS)}.")
    return Entry(source, source, ADDED_ROWS[source], shape, False)


def _entry(source: str, shape: tuple[int, ...]) -> Entry:
    name = source.removeprefix(_PREFIX)
    match = next((each for each in _ROLES.finditer(name) if each.end() == len(name)), None)
    if match is not None and (match[1], match[2]) in _NAMES:
        return Entry(source, name[: match.start()], _NAMES[match[1], match[2]], shape, "embedding" in match[1])
    if name.endswith(".bias"):
        return Entry(source, name.removesuffix(".bias"), "bias", shape, False)
    if name.endswith(".weight"):
        return Entry(source, name.removesuffix(".weight"), "base", shape, False)
    raise CheckpointError(f"the tensor {source!r:.200} is not one of a LoRA adapter's.")
