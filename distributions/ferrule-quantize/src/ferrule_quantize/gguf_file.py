"""Writes a float checkpoint as one GGUF file, with the types that llama.cpp's own quantizer gives each tensor."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ferrule import __version__
from ferrule.checkpoint import read
from ferrule.errors import ConfigError
from ferrule.interfaces.tokenizer import TokenizerSource
from ferrule_files.gguf.reader import TYPES
from ferrule_files.offline import Outline
from ferrule_files.shards import progress
from ferrule_quantize.gguf import description, vocabulary
from ferrule_quantize.gguf.encode import encode
from ferrule_quantize.layers import compiled
from ferrule_quantize.source import check_finite, open_source

FORMAT_VERSION = 2  # `general.quantization_version`
_SIZES = {kind.name: kind for kind in TYPES.values()}
_SMALLER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where rows are not whole blocks of 256
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROUTER = "ffn_gate_inp"
_BYTES = ("tokenizer.ggml.precompiled_charsmap",)


@dataclass(frozen=True)
class Mix:
    """Types of matrices: `most`; `outer` of the output layer, or of the table that is that too; `finer` of some.

    `number` is llama.cpp's of the mix, `general.file_type`.
    """

    number: int
    most: str
    outer: str
    finer: str

    def type_of(self, name: str, shape: Sequence[int], layers: int, tied: bool) -> str | None:
        """Return the type of a tensor; None for a tensor that stays floats."""
        block = _BLOCK.fullmatch(name)
        if len(shape) < 2 or (block and block[2].startswith(_ROUTER)):
            return None
        kind = self.most
        if name == "output.weight" or (tied and name == "token_embd.weight"):
            kind = self.outer
        elif block and block[2] in ("attn_v", "ffn_down", "ffn_down_exps") and _is_finer(int(block[1]), layers):
            kind = self.finer
        if shape[-1] % _SIZES[kind].size:
            kind = _SMALLER.get(kind, kind)
        return None if shape[-1] % _SIZES[kind].size else kind


MIXES: Mapping[str, Mix] = {
    "q8_0": Mix(7, "Q8_0", "Q8_0", "Q8_0"),
    "q4_0": Mix(2, "Q4_0", "Q6_K", "Q4_0"),
    "q4_k_m": Mix(15, "Q4_K", "Q6_K", "Q6_K"),
}


def write(
    source: Path,
    file: Path,
    mix: Mix,
    outline: Outline,
    tokenizers: TokenizerSource | None = None,
    ignore: Sequence[str] = (),
) -> tuple[int, int]:
    """Write the checkpoint in the folder `source`, whose model is outlined; return bytes of weights before and after.

    `tokenizers` opens the tokenizer that goes into the file; without it the file has none.

    Raises CheckpointError, ConfigError, OSError.
    """
    tensors = open_source(source)
    model = description.describe(read(source), tensors, outline.built)
    plan = _plan(model, mix, [compiled(text) for text in ignore])
    new = sum(each.num_bytes for each in plan.values())
    free = shutil.disk_usage(file.parent).free
    if new > free:
        raise ConfigError(f"{file.parent} has {free / 1e9:.2f} GB of free space; {new / 1e9:.2f} GB are needed.")
    metadata = {
        **model.metadata,
        "general.name": source.name,
        "general.file_type": mix.number,
        "general.quantization_version": FORMAT_VERSION,
        "general.quantized_by": f"ferrule {__version__}",
        **(
            vocabulary.describe(source, plan["token_embd.weight"].shape[0], tokenizers)
            if tokenizers is not None
            else {"tokenizer.ggml.model": "no_vocab"}
        ),
    }
    writer = _opened(file, metadata, plan)
    old = sum(tensor.nbytes for tensor in tensors.values())
    with progress({}, new, "quantizing") as bar:
        for name, each in plan.items():
            whole = model.added[name] if name in model.added else model.joined(name)
            check_finite(source, name, whole)
            writer.write_tensor_data(encode(each.kind, whole))
            bar.update(each.num_bytes)
    writer.close()
    return old, new


@dataclass(frozen=True)
class _Planned:
    shape: tuple[int, ...]
    kind: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // _SIZES[self.kind].size * _SIZES[self.kind].num_bytes


def _plan(model: description.Written, mix: Mix, ignore: Sequence[re.Pattern[str]]) -> dict[str, _Planned]:
    """Return the shape and type of each tensor of the file, in their order."""
    tied, layers = "output.weight" not in model.tensors, int(model.metadata[f"{model.name}.block_count"])
    found = {}
    for name, targets in model.tensors.items():
        first = model.own[targets[0].name]
        shape = (len(targets), *first.shape) if targets[0].expert >= 0 else tuple(first.shape)
        kind = mix.type_of(name, shape, layers, tied)
        layer = f"model.{targets[0].name.removesuffix('.weight')}"
        if kind is None or any(pattern.fullmatch(layer) for pattern in ignore):
            small = len(shape) < 2 or _ROUTER in name or first.dtype == torch.float32
            kind = "F32" if small else "BF16" if first.dtype == torch.bfloat16 else "F16"
        found[name] = _Planned(shape, kind)
    return found | {name: _Planned(tuple(tensor.shape), "F32") for name, tensor in model.added.items()}


def _is_finer(layer: int, layers: int) -> bool:
    """Return whether a layer is in the first or last eighth of all layers, or every third one between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _opened(file: Path, metadata: Mapping[str, Any], plan: Mapping[str, _Planned]) -> Any:
    """Return a writer of the `gguf` package whose next bytes are those of tensors."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    writer = GGUFWriter(str(file), metadata["general.architecture"])
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    for key, value in metadata.items():
        if key == "general.architecture":  # the writer states it
            continue
        if isinstance(value, list):
            writer.add_array(key, bytes(value) if key in _BYTES else value)
        else:
            writer.add_key_value(key, value, kinds.get(type(value), GGUFValueType.STRING))
    for name, each in plan.items():
        writer.add_tensor_info(name, each.shape, np.dtype(np.float32), each.num_bytes, GGMLQuantizationType[each.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def check_place(file: Path, force: bool) -> None:
    """Raise ConfigError where something is that may not be replaced, and for a name that is not that of a file."""
    if file.suffix != ".gguf":
        raise ConfigError(f"{file} is not named like a GGUF file.", "--output must end in .gguf.")
    if not file.exists() and not file.is_symlink():
        return
    if not file.is_file() or file.is_symlink() or file.open("rb").read(4) != b"GGUF":
        raise ConfigError(f"{file} is not a GGUF file.", "--output FILE names another one.")
    if not force:
        raise ConfigError(f"{file} exists.", "--force replaces it; --output FILE names another one.")
