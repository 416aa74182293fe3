"""The one decoder of embeddings, of clients and of adapters. It executes nothing: no pickle is loaded, and there is no
torch here.

It takes a file that ``torch.save`` wrote for one tensor, or a safetensors file with one tensor; clients send its
base64. An adapter's file has it under a name. The tensor is dense, contiguous, finite, [tokens, size] or
[1, tokens, size], and float32, float16 or bfloat16.

A file of ``torch.save`` is an archive with a pickle. Its opcodes must be exactly those of a plain tensor, or of a
dictionary with one under that name; none is executed.
"""

from __future__ import annotations

import hashlib
import struct
from binascii import a2b_base64
from collections.abc import Sequence
from math import prod
from pickletools import genops
from typing import Any, NamedTuple

import msgspec

from ferrule.errors import RequestError
from ferrule.types import HostTensor, MediaItem

_PIECE = 1 << 20  # characters of base64 at once: other threads get their turn between
_MAX_HEADER = 64 << 10  # bytes of a tensor's description
_MAX_ENTRIES = 64  # of an archive
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}  # all ones: not finite
_STORAGES = {"torch FloatStorage": "float32", "torch HalfStorage": "float16", "torch BFloat16Storage": "bfloat16"}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"} | _STORAGES
_INTEGERS = ("K", "M", "J", "\x8a")  # opcodes of pickle
_CODES = {"q": "", "r": "", "\x88": "B", "\x89": "B"} | dict.fromkeys(_INTEGERS, "I")  # memo: nothing; booleans: B
_PLAIN = {  # what torch.save writes for one dense tensor: _rebuild_tensor_v2(storage, offset, shape, stride, …)
    f"\x80{key}c((XcXXItQI{'I' * rank}{end}{'I' * rank}{end}Bc)RtR{put}.": rank
    for rank, end in ((2, "\x86"), (3, "\x87"))
    for key, put in (("", ""), ("}X", "s"))  # alone, or under the one name of a dictionary
}
_FORM = (
    "what torch.save writes for a dense, contiguous tensor of float32, float16 or bfloat16, or a safetensors file with "
    "one"
)
_END = struct.Struct("<4s6xHII2x")  # of a zip archive: entries, then bytes and place of their list
_ENTRY = struct.Struct("<4s6xH8xIIHHH8xI")  # method, sizes, lengths of three names, place
_LOCAL = struct.Struct("<4s22xHH")


class _Raw(NamedTuple):
    dtype: str
    shape: Sequence[int]
    data: memoryview


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_embeds(text: Any, size: int, max_tokens: int) -> MediaItem:
    """Read a prompt of at most `max_tokens` embeddings of `size` values, in linear time. Raises RequestError."""
    try:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        file = b"".join(a2b_base64(piece, strict_mode=True) for piece in pieces)
    except (TypeError, ValueError):
        raise RequestError(f"prompt_embeds must be base64 of {_FORM}.", "prompt_embeds") from None
    try:
        return embeds_item(read_file(file, size, max_tokens))
    except ValueError as error:
        raise RequestError(f"prompt_embeds must {error}.", "prompt_embeds") from None


def read_file(file: bytes, size: int, max_tokens: int, name: str | None = None) -> HostTensor:
    """Read a file with at most `max_tokens` embeddings of `size` values, in linear time. With `name`, the tensor must
    have that name in it.

    Raises ValueError, whose text says what the file must be or have.
    """
    try:
        raw = _read_torch(file, name) if file.startswith(b"PK") else _read_safetensors(file, name)
        dtype = _NAMES[raw.dtype]
        *batch, tokens, width = (1, *raw.shape) if len(raw.shape) == 2 else raw.shape
    except (LookupError, RecursionError, TypeError, ValueError, struct.error, msgspec.MsgspecError):
        raise ValueError(f"be {_FORM}") from None
    if batch != [1] or width != size or not 1 <= tokens <= max_tokens:
        shape = ", ".join(map(str, raw.shape))
        raise ValueError(f"be [tokens, {size}] with 1 to {max_tokens} tokens, not [{shape:.60}]")
    if len(raw.data) != tokens * size * _WIDTHS[dtype]:
        raise ValueError("have as many bytes as its shape needs")
    import numpy as np  # few requests need it, and it takes as long to import as all else here

    exponents = np.frombuffer(raw.data, dtype=f"<u{_WIDTHS[dtype]}") & _EXPONENTS[dtype]
    if (exponents == _EXPONENTS[dtype]).any():
        raise ValueError("hold finite numbers only")
    return HostTensor(shape=(tokens, size), dtype=dtype, data=bytes(raw.data))


def embeds_item(given: HostTensor) -> MediaItem:
    """Return a prompt that is embeddings [tokens, size]."""
    tokens, size = given.shape
    digest = hashlib.sha256(f"{given.dtype} {size} ".encode())
    digest.update(given.data)
    return MediaItem(kind="embeds", digest=digest.digest(), start=0, count=tokens, data={"embeds": given})


def _read_safetensors(file: bytes, name: str | None) -> _Raw:
    """Read a file with one tensor: https://github.com/huggingface/safetensors#format"""
    (length,) = struct.unpack_from("<Q", file)
    header = msgspec.json.decode(file[8 : 8 + min(length, _MAX_HEADER)], type=dict[str, Any])
    header.pop("__metadata__", None)
    ((found, value),) = header.items()
    entry, data = msgspec.convert(value, _Entry), memoryview(file)[8 + length :]
    if entry.data_offsets != (0, len(data)) or found != (name or found):
        raise ValueError
    return _Raw(entry.dtype, entry.shape, data)


def _read_torch(file: bytes, name: str | None) -> _Raw:
    """Read a file with one tensor: https://docs.pytorch.org/docs/stable/notes/serialization.html"""
    files = _read_zip(file)
    (*names, _, _, kind, key, _, _), (elements, offset, *sizes), rank = _read_pickle(files["data.pkl"])
    if names != ([] if name is None else [name]):
        raise ValueError
    shape, strides, data, width = sizes[:rank], sizes[rank:], files[f"data/{key}"], _WIDTHS[_NAMES[kind]]
    dense = all(shape[n] == 1 or strides[n] == prod(shape[n + 1 :]) for n in range(rank))
    inside = len(data) == elements * width and 0 <= offset <= elements - prod(shape)
    if not dense or not inside or files.get("byteorder", b"little") != b"little":
        raise ValueError
    return _Raw(kind, shape, data[offset * width : (offset + prod(shape)) * width])


def _read_pickle(data: memoryview) -> tuple[list[str], list[int], int]:
    """Return the texts and the numbers of a pickled tensor, in their order, and its rank. The pickle's opcodes are only
    listed, never run.
    """
    codes, texts, numbers = "", list[str](), list[int]()
    for opcode, argument, _ in genops(bytes(data[:_MAX_HEADER])):
        codes += _CODES.get(opcode.code, opcode.code)
        if isinstance(argument, str):
            texts.append(argument)
        elif isinstance(argument, int) and opcode.code in _INTEGERS:
            numbers.append(argument)
    if [*texts[-6:-4], *texts[-1:]] != ["torch._utils _rebuild_tensor_v2", "storage", "collections OrderedDict"]:
        raise ValueError
    return texts, numbers, _PLAIN[codes]


def _read_zip(file: bytes) -> dict[str, memoryview]:
    """Return the files in the top folder of an archive; all of them must be stored without compression."""
    signature, count, _, place = _END.unpack(file[-_END.size :])
    files: dict[str, memoryview] = {}
    for _ in range(min(count, _MAX_ENTRIES)):
        mark, method, packed, size, *lengths, start = _ENTRY.unpack_from(file, place)
        name = file[place + _ENTRY.size : place + _ENTRY.size + lengths[0]].decode()
        local, *local_lengths = _LOCAL.unpack_from(file, start)
        begin = start + _LOCAL.size + sum(local_lengths)
        if (signature, mark, local) != (b"PK\5\6", b"PK\1\2", b"PK\3\4") or method or packed != size:
            raise ValueError
        files[name.partition("/")[2]] = memoryview(file)[begin : begin + size]
        place += _ENTRY.size + sum(lengths)
    return files
