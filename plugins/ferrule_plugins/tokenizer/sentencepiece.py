"""Folders with a SentencePiece ``tokenizer.model`` alone, as a ``tokenizer.json`` would have it.

The file is a protobuf: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. What its
fields are called here is what GGUF files call them, whose tokenizers are made of the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule_files.gguf.reader import GgufModel
from ferrule_files.gguf.tokens import Vocabulary, read_tokenizer

FILE = "tokenizer.model"
# Classes that add nothing of their own to the model in the file. Without a stated class it is one of these.
CLASSES = frozenset(
    f"{name}Tokenizer{fast}"
    for name in ("Llama", "CodeLlama", "Gemma", "InternLM", "InternLM2", "Baichuan", "Yi")
    for fast in ("", "Fast")
)
_MAX_BYTES = 16 << 20  # the largest published have 6
_MOST_PIECES = 1 << 20
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BYTE = 6  # type of a piece
_KINDS = {1: "t5", 2: "llama"}  # unigram and BPE
_SIZES = (8, 4)  # of fields with a fixed one
_ROLES = {40: ("unknown", 0), 41: ("bos", 1), 42: ("eos", 2), 43: ("padding", -1)}  # fields, and what they are if unset


def read_file(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a ``tokenizer.json`` and a ``tokenizer_config.json`` would have. Raises CheckpointError."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes.")
        metadata = _metadata(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise CheckpointError(
            f"{file} is not a SentencePiece model of the kinds BPE and unigram.",
            "Put a tokenizer.json beside it, or name another tokenizer with --tokenizer.",
        ) from None
    return read_tokenizer(Vocabulary(GgufModel((file,), metadata, {})))


class _ProtobufMessage:
    """A protobuf message; of a field that comes several times, the last counts. Raises ValueError for other data."""

    def __init__(self, data: bytes) -> None:
        self._fields = dict(_fields(data))

    def number(self, field: int, default: int) -> int:
        found = self._fields.get(field, default)
        if not isinstance(found, int):
            raise ValueError(f"field {field} is not a number")
        return found - (1 << 64) if found >> 63 == 1 else found

    def data(self, field: int, default: bytes = b"") -> bytes:
        found = self._fields.get(field, default)
        if not isinstance(found, bytes):
            raise ValueError(f"field {field} is not of bytes")
        return found

    def real(self, field: int) -> float:
        found = self.data(field, bytes(4))
        if len(found) != 4:
            raise ValueError(f"field {field} does not have 32 bits")
        return float(struct.unpack("<f", found)[0])


def _metadata(data: bytes) -> Mapping[str, Any]:
    """Return the metadata of a GGUF file with the same tokenizer. Raises ValueError if the data is not such a model."""
    fields = list(islice(_fields(data), _MOST_PIECES + 1))
    if len(fields) > _MOST_PIECES:
        raise ValueError("too many fields")
    whole = [(number, value) for number, value in fields if isinstance(value, bytes)]
    pieces = [_ProtobufMessage(value) for number, value in whole if number == _PIECES]
    trainer, normalizer = (
        _ProtobufMessage(b"".join(value for number, value in whole if number == part))
        for part in (_TRAINER, _NORMALIZER)
    )
    kinds = [piece.number(3, 1) for piece in pieces]
    kind = _KINDS.get(trainer.number(3, 1))
    if kind is None or not pieces or (kind == "t5" and _BYTE in kinds):
        raise ValueError("another kind of model")
    found = {
        "model": kind,
        "tokens": [piece.data(1).decode() for piece in pieces],
        "scores": [piece.real(2) for piece in pieces],
        "token_type": kinds,
        "add_space_prefix": bool(normalizer.number(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.number(4, 1)),
        "precompiled_charsmap": list(normalizer.data(2)),
        "add_bos_token": True,  # as these classes do where nothing is stated
        "add_eos_token": False,
        **{f"{role}_token_id": trainer.number(field, usual) for field, (role, usual) in _ROLES.items()},
    }
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the numbers and values of a message's fields: integers, or bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        if key & 7 not in (0, 1, 2, 5):
            raise ValueError("a field of another type")
        value: int | bytes
        if key & 7 == 0:
            value, at = _integer(data, at)
        else:
            size, at = _integer(data, at) if key & 7 == 2 else (_SIZES[key & 7 != 1], at)
            if at + size > len(data):
                raise ValueError("a field that is cut off")
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits to the byte, and where it ends. Raises ValueError."""
    found = 0
    for place, byte in enumerate(data[at : at + 10]):
        found |= (byte & 127) << (7 * place)
        if byte < 128:
            return found, at + place + 1
    raise ValueError("a number without an end")
