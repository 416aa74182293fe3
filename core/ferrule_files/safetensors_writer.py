"""Writes tensors to safetensors files, one after the other, without copying them.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

SHARD_BYTES = 4_000_000_000  # of one file, or a single tensor that is larger
SINGLE = "model.safetensors"
_TYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def write(folder: Path, tensors: Mapping[str, torch.Tensor], most: int = SHARD_BYTES) -> list[Path]:
    """Write tensors to one file, or to several and an index, and return the files without the index. Raises OSError."""
    parts = list(shards(tensors, most))
    if len(parts) == 1:
        write_file(folder / SINGLE, tensors)
        return [folder / SINGLE]
    files, places = [], {}
    for number, part in enumerate(parts, 1):
        files.append(folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        write_file(files[-1], part)
        places.update(dict.fromkeys(part, files[-1].name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


def shards(tensors: Mapping[str, torch.Tensor], most: int = SHARD_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in their order, cut before the bytes of a file pass `most`."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def write_file(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file. Raises OSError."""
    with file.open("wb") as stream:
        write_header(stream, tensors)
        for tensor in tensors.values():
            write_data(stream, tensor)


def write_header(stream: IO[bytes], tensors: Mapping[str, torch.Tensor], **said: str) -> None:
    """Write the header for these tensors, which may be on the meta device. Raises OSError.

    `said` are further entries of the file's metadata.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **said}}
    position = 0
    for name, tensor in tensors.items():
        offsets = [position, position + tensor.nbytes]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)


def write_data(stream: IO[bytes], tensor: torch.Tensor) -> None:
    """Write the numbers of one tensor. Raises OSError."""
    stream.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
