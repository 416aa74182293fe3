"""Blocks of quantized numbers as integers with scales and offsets, to the numbers that ggml's own code makes of them.

By the compiled kernel, and in torch where there is none: both give the same. Every type here is of the form
number * scale + offset, with one scale and one offset for a group of numbers. Those of k-quants have two levels: a
float for a block, times an integer of few bits for each group.
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ferrule_files.gguf.reader import FLOATS, TYPES, TensorInfo
from ferrule_kernels.cpu import blocks as kernels
from ferrule_kernels.matmul import Levels

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
TABLES: Mapping[str, tuple[int, ...]] = {"IQ4_NL": _IQ4, "IQ4_XS": _IQ4, "MXFP4": _FP4}  # whose blocks have codes
BITS: Mapping[str, int] = {  # of the numbers
    "Q2_K": 2,
    "Q3_K": 3,
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q5_K": 5,
    "Q6_K": 6,
    "Q8_0": 8,
    **dict.fromkeys(TABLES, 8),
}
OFFSETS = frozenset(("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"))  # types that have them
GROUPS: Mapping[str, int] = dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 16)  # numbers with one scale, where not 32
BLOCK = 256  # numbers with one float, of types whose groups multiply it by an integer of so many bits, or of fewer
STEPS: Mapping[str, int] = {"Q2_K": 4, **dict.fromkeys(("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 8)}
_NUMBERS = {each.name: number for number, each in TYPES.items()}  # of ggml
_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS = 1 << 20  # bytes that are decoded at a time


@dataclass(frozen=True)
class Decoded:
    """Numbers int8 [rows, k], from 0 on where there are offsets; places in the `table` where there is one."""

    numbers: torch.Tensor
    scales: Levels
    offsets: Levels | None = None
    table: tuple[int, ...] = ()

    def widened(self) -> torch.Tensor:
        """Return the values of the numbers, float32 [rows, k]."""
        scales, numbers = self.scales.spread(), self.numbers
        if self.table:
            numbers = torch.tensor(self.table, dtype=torch.int8, device=numbers.device)[numbers.int()]
        cells = numbers.view(*scales.shape, -1) * scales.unsqueeze(-1)
        if self.offsets is not None:
            cells = cells + self.offsets.spread().unsqueeze(-1)
        return cells.flatten(1)


def map_file(file: Path) -> mmap.mmap:
    """Map a file copy-on-write, so that its pages can become tensors; nothing writes to them."""
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def stored(info: TensorInfo, data: mmap.mmap) -> torch.Tensor:
    """Return a tensor as the file has it: floats in their shape, else bytes [..., bytes of a row]."""
    if info.type.name in FLOATS:
        dtype = _FLOAT_TYPES[info.type.name]
        count = info.num_bytes // dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=count, offset=info.start).view(info.shape)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=info.num_bytes, offset=info.start)
    return flat.view(*info.shape[:-1], info.row_bytes)


def decode(kind: str, rows: torch.Tensor) -> Decoded:
    """Decode rows of blocks, uint8 [rows, bytes]."""
    if _compiled(rows):
        return Decoded(*kernels.read(_NUMBERS[kind], rows), TABLES.get(kind, ()))
    whole: Decoded | None = None
    for start, some in _some_rows(rows):  # each put in its place, so that nothing is there twice
        part = _decode(kind, some)
        if len(some) == len(rows):
            return part
        if whole is None:
            whole = _made(part, lambda own: torch.empty(len(rows), own.shape[1], dtype=own.dtype))
        for place, own in zip(_tensors(whole), _tensors(part), strict=True):
            place[start : start + len(some)] = own
    return whole or _decode(kind, rows)


def widen(kind: str, rows: torch.Tensor, dtype: torch.dtype, place: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows of blocks as floats [rows, k], written into `place`, a tensor of that type, if one is given."""
    block = TYPES[_NUMBERS[kind]]
    if place is None:
        place = torch.empty(len(rows), rows.shape[1] // block.num_bytes * block.size, dtype=dtype)
    if _compiled(rows) and dtype in kernels.WIDENED and place.is_contiguous():
        kernels.widen(_NUMBERS[kind], rows, place, TABLES.get(kind, ()))
        return place
    for start, some in _some_rows(rows):
        place[start : start + len(some)] = _decode(kind, some).widened()
    return place


def _compiled(rows: torch.Tensor) -> bool:
    return kernels.takes(rows) and rows.stride(1) == 1


def _some_rows(rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    size = max(1, _ROWS // max(1, rows.shape[1]))
    return ((start, rows[start : start + size]) for start in range(0, len(rows), size))


def _levels(decoded: Decoded) -> tuple[Levels, ...]:
    return (decoded.scales,) if decoded.offsets is None else (decoded.scales, decoded.offsets)


def _tensors(decoded: Decoded) -> list[torch.Tensor]:
    found = (decoded.numbers, *(each for own in _levels(decoded) for each in (own.floats, own.steps)))
    return [each for each in found if each is not None]


def _made(decoded: Decoded, make: Callable[[torch.Tensor], torch.Tensor]) -> Decoded:
    """Return a copy of `decoded` with `make` applied to each tensor."""
    levels = [Levels(make(own.floats), None if own.steps is None else make(own.steps)) for own in _levels(decoded)]
    return Decoded(make(decoded.numbers), levels[0], levels[1] if len(levels) > 1 else None, decoded.table)


def _decode(kind: str, rows: torch.Tensor) -> Decoded:
    numbers, scales, *offsets = _DECODERS[kind](rows.reshape(-1, TYPES[_NUMBERS[kind]].num_bytes))
    whole = Decoded(numbers.to(torch.int8), scales, offsets[0] if offsets else None, TABLES.get(kind, ()))
    return _made(whole, lambda own: own.view(len(rows), -1))


_Parts = tuple[torch.Tensor, Levels] | tuple[torch.Tensor, Levels, Levels]  # of blocks, each a row


def _of_groups(floats: torch.Tensor, steps: torch.Tensor) -> Levels:
    """Return levels of one float for each block, times an integer for each group."""
    return Levels(floats, steps.to(torch.int8))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Read one float of 16 bits from each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(quants: torch.Tensor) -> torch.Tensor:
    """Split bytes [blocks, n] into [blocks, 2 n]: all low halves, then all high ones."""
    return torch.cat((quants & 15, quants >> 4), 1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return 32 bits of each block as 16 or 0, int16 [blocks, 32]."""
    return _bits(blocks[:, at : at + 4]).to(torch.int16) << 4


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Split bytes [blocks, n] into bits, lowest first, [blocks, 8 n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-1) >> shifts & 1).flatten(1)


def _fields(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes into fields of 2 or 4 bits in the k-quants' order, [blocks, parts, n].

    Of each n bytes all lowest fields come first.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return data.unsqueeze(-2) >> shifts.unsqueeze(-1) & (1 << bits) - 1


def _q4_0(b: torch.Tensor) -> _Parts:
    return _nibbles(b[:, 2:]).to(torch.int8) - 8, Levels(_half(b, 0))


def _q4_1(b: torch.Tensor) -> _Parts:
    return _nibbles(b[:, 4:]), Levels(_half(b, 0)), Levels(_half(b, 2))


def _q5_0(b: torch.Tensor) -> _Parts:
    return (_nibbles(b[:, 6:]) | _fifth_bits(b, 2)) - 16, Levels(_half(b, 0))


def _q5_1(b: torch.Tensor) -> _Parts:
    return _nibbles(b[:, 8:]) | _fifth_bits(b, 4), Levels(_half(b, 0)), Levels(_half(b, 2))


def _q8_0(b: torch.Tensor) -> _Parts:
    return b[:, 2:].contiguous().view(torch.int8), Levels(_half(b, 0))


def _iq4_nl(b: torch.Tensor) -> _Parts:
    return _nibbles(b[:, 2:]), Levels(_half(b, 0))


def _iq4_xs(b: torch.Tensor) -> _Parts:
    """Decode eight groups of 32, whose scales have 6 bits: four in `low`, two in `high`."""
    high = b[:, 2:4].contiguous().view(torch.uint16).int()
    upper = high >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    lower = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), -1).flatten(1).int()
    numbers = torch.cat([_nibbles(each) for each in torch.split(b[:, 8:], 16, 1)], 1)
    return numbers, _of_groups(_half(b, 0), (lower | upper << 4) - 32)


def _mxfp4(b: torch.Tensor) -> _Parts:
    powers = torch.exp2(b[:, :1].double() - 128).float()  # the numbers are doubled
    return _nibbles(b[:, 1:]), Levels(powers)


def _q2_k(b: torch.Tensor) -> _Parts:
    both, quants = b[:, :16], b[:, 16:80].view(-1, 2, 32)
    numbers = _fields(quants, 2).flatten(1)
    return numbers, _of_groups(_half(b, 80), both & 15), _of_groups(-_half(b, 82), both >> 4)


def _q3_k(b: torch.Tensor) -> _Parts:
    """Decode numbers of three bits. The third bit is stored inverted: where it is 0, the number is four less."""
    low = _fields(b[:, 32:96].view(-1, 2, 32), 2).flatten(1).to(torch.int8)
    high = _bits(b[:, :32]).view(-1, 32, 8).transpose(1, 2).flatten(1).to(torch.int8)
    packed = b[:, 96:108]
    lower = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1).int()
    upper = _fields(packed[:, 8:].unsqueeze(1), 2).flatten(1).int()
    return low - 4 * (1 - high), _of_groups(_half(b, 108), (lower | upper << 4) - 32)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack eight scales and eight mins of 6 bits from 12 bytes, both [blocks, 8]."""
    a, b, c = torch.split(packed, 4, 1)
    scales = torch.cat((a & 63, c & 15 | a >> 6 << 4), 1)
    mins = torch.cat((b & 63, c >> 4 | b >> 6 << 4), 1)
    return scales, mins


def _q4_k(b: torch.Tensor) -> _Parts:
    scales, mins = _six_bits(b[:, 4:16])
    numbers = _fields(b[:, 16:].view(-1, 4, 32), 4).flatten(1)
    return numbers, _of_groups(_half(b, 0), scales), _of_groups(-_half(b, 2), mins)


def _q5_k(b: torch.Tensor) -> _Parts:
    scales, mins = _six_bits(b[:, 4:16])
    low = _fields(b[:, 48:].view(-1, 4, 32), 4).flatten(1)
    high = _bits(b[:, 16:48]).view(-1, 32, 8).transpose(1, 2).flatten(1)
    return low | high << 4, _of_groups(_half(b, 0), scales), _of_groups(-_half(b, 2), mins)


def _q6_k(b: torch.Tensor) -> _Parts:
    low = _fields(b[:, :128].view(-1, 2, 64), 4).flatten(1)
    high = _fields(b[:, 128:192].view(-1, 2, 32), 2).flatten(1)
    scales = b[:, 192:208].contiguous().view(torch.int8)
    return (low | high << 4).to(torch.int8) - 32, _of_groups(_half(b, 208), scales)


_DECODERS: Mapping[str, Callable[[torch.Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
