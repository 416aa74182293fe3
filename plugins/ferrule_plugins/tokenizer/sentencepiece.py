"""Folders with a SentencePiece ``tokenizer.model`` alone, as a ``tokenizer.json`` would have it.

The file is a protobuf: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. What its
fields are called here is what GGUF files call them, whose tokenizers are made of the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule_plugins.gguf.reader import GgufModel
from ferrule_plugins.gguf.tokens import read_tokenizer

FILE = "tokenizer.model"
# Classes that add nothing of their own to the model in the file. Without a stated class it is one of these.
CLASSES = frozenset(
    f"{name}Tokenizer{fast}"
    for name in ("Llama", "CodeLlama", "Gemma", "InternLM", "InternLM2", "Baichuan", "Yi")
    for fast in ("", "Fast")
)
_MAX_BYTES = 64 << 20
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BYTE = 6  # type of a piece
_KINDS = {1: "t5", 2: "llama"}  # unigram and BPE
_SIZES = (8, 4)  # of fields with a fixed one
_ROLES = {40: ("unknown", 0), 41: ("bos", 1), 42: ("eos", 2), 43: ("padding", -1)}  # fields, and what they are if unset


def read_file(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a ``tokenizer.json`` and a ``tokenizer_config.json`` would have. Raises CheckpointError."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes.")
        metadata = _metadata(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, struct.error):
        raise CheckpointError(
            f"{file} is not a SentencePiece model of the kinds BPE and unigram.",
            "Put a tokenizer.json beside it, or name another tokenizer with --tokenizer.",
        ) from None
    return read_tokenizer(GgufModel((file,), metadata, {}))


def _metadata(data: bytes) -> Mapping[str, Any]:
    """Raises a usual kind of error for what is no such model."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            own = dict(_fields(value))
            pieces.append((own[1].decode(), struct.unpack("<f", own.get(2, bytes(4)))[0], own.get(3, 1)))
        elif number in (_TRAINER, _NORMALIZER):
            (trainer if number == _TRAINER else normalizer).update(_fields(value))
    kinds = [kind for _, _, kind in pieces]
    kind = _KINDS.get(trainer.get(3, 1))
    if kind is None or not pieces or (kind == "t5" and _BYTE in kinds):
        raise ValueError
    found = {
        "model": kind,
        "tokens": [text for text, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": kinds,
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "precompiled_charsmap": list(normalizer.get(2, b"")),
        "add_bos_token": True,  # as these classes do where nothing is stated
        "add_eos_token": False,
        **{f"{role}_token_id": _signed(trainer.get(field, usual)) for field, (role, usual) in _ROLES.items()},
    }
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        if key & 7 not in (0, 1, 2, 5):
            raise ValueError
        value: int | bytes
        if key & 7 == 0:
            value, at = _integer(data, at)
        else:
            size, at = _integer(data, at) if key & 7 == 2 else (_SIZES[key & 7 != 1], at)
            if at + size > len(data):
                raise ValueError
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits to the byte, and where it ends."""
    found = 0
    for place in range(10):
        found |= (data[at + place] & 127) << (7 * place)
        if data[at + place] < 128:
            return found, at + place + 1
    raise ValueError
