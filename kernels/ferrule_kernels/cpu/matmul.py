"""Products with quantized weights: tensors to the kernel in ``matmul.cpp``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ferrule_kernels.cpu import blocks, library
from ferrule_kernels.cpu.dense import check_rows
from ferrule_kernels.cpu.pages import weight_memory
from ferrule_kernels.matmul import Form, Levels

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_UNFIT = "a weight is not a finite number, or too large to be quantized"
_BYTES = 2  # the type of numbers of 8 bits, which can be packed alone
PANEL = 64  # outputs that the kernel keeps together
_CONVERTED = 1 << 22  # weights that are converted at a time
LANES = 16  # channels are rounded up to it
LONGEST = 65536  # inputs: the sum of a group must fit 32 bits


class _Matrix(ctypes.Structure):
    """`Matrix` of the kernel, field by field."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "k", "inputs", "group", "block")),
        *((name, ctypes.c_int32) for name in ("bits", "digits", "offsets", "coded", "halves", "steps")),
        ("factors", ctypes.c_void_p),
        ("table", ctypes.c_uint8 * 16),
    ]


class _Kernels(NamedTuple):
    pack: Any
    turn: Any
    multiply: Any
    memory: Any  # bytes that `multiply` needs
    rows: Any
    pack_blocks: Any
    pack_fp8: Any


@functools.cache
def _kernels() -> _Kernels:
    """Load the kernels and declare their types. Raises KernelsUnavailableError."""
    loaded, at = library.load(), ctypes.c_void_p
    loaded.ferrule_pack.argtypes = (at, at, ctypes.c_int32, at, at, at, at)
    loaded.ferrule_multiply.argtypes = (at, at, at, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, at)
    loaded.ferrule_multiply_memory.argtypes = (at, ctypes.c_int64, ctypes.c_int64)
    loaded.ferrule_multiply_memory.restype = ctypes.c_int64
    loaded.ferrule_rows.argtypes = (at, at, ctypes.c_int64, ctypes.c_int32, at)
    loaded.ferrule_rows.restype = ctypes.c_int64
    loaded.ferrule_turn.argtypes = (at,)
    loaded.ferrule_pack_blocks.argtypes = (at, ctypes.c_int32, at, ctypes.c_int64, ctypes.c_int64)
    loaded.ferrule_pack_blocks.restype = ctypes.c_float
    loaded.ferrule_pack_fp8.argtypes = (at, at, at, *[ctypes.c_int64] * 3, ctypes.c_int32)
    loaded.ferrule_pack_fp8.restype = ctypes.c_int
    pack, turn, multiply = loaded.ferrule_pack, loaded.ferrule_turn, loaded.ferrule_multiply
    pack.restype = ctypes.c_int
    turn.restype = multiply.restype = None
    memory, rows, pack_blocks = loaded.ferrule_multiply_memory, loaded.ferrule_rows, loaded.ferrule_pack_blocks
    return _Kernels(pack, turn, multiply, memory, rows, pack_blocks, loaded.ferrule_pack_fp8)


class Workspace:
    """Memory for quantized rows, which grows to the largest step and is reused. All layers of a model share one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at(self, size: int) -> int:
        """Return the address of `size` bytes, valid until the next call."""
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory.data_ptr()


class UnfitWeightError(ValueError):
    """An error for a weight with a number that cannot be quantized."""


class PackedMatrix:
    """A weight [n, k] in the kernel's order. Raises KernelsUnavailableError.

    With `scales` [n, groups], or of the two levels of the form's blocks, the weight was quantized before and holds the
    form's numbers or codes. Scales are stored in the form's 16 bits; where a channel has one scale, the part lost in
    rounding is given back to the result: those are the `factors`. `offsets` are like the scales, and are added to each
    weight of a group. Raises ValueError for arguments that do not agree with the form, and UnfitWeightError.

    `packed` and `factors` are the matrix's whole content: see ``ferrule_kernels.cpu.packed`` for files of them.
    """

    form: Form
    packed: torch.Tensor
    factors: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor,
        form: Form,
        bias: torch.Tensor | None,
        workspace: Workspace,
        scales: torch.Tensor | Levels | None = None,
        offsets: torch.Tensor | Levels | None = None,
    ) -> None:
        if (form.table or form.halves or form.steps) and scales is None:
            raise ValueError("weights of a table, with steps or with float16 come as numbers or codes, with scales")
        if form.offsets != (offsets is not None) or (form.offsets and scales is None):
            raise ValueError("weights with offsets come as numbers, scales and offsets, and have a form that says so")
        given = tuple(None if each is None else _kept(each, form) for each in (scales, offsets))
        factors = _lost(scales, given[0]) if isinstance(scales, torch.Tensor) and given[0] else None
        packed = weight_memory((form.packed_bytes(*weight.shape),), torch.uint8)
        self._set_up(packed, factors, tuple(weight.shape), form, bias, workspace)
        rows = max(1, _CONVERTED // max(1, self.inputs) // PANEL) * PANEL
        if self._type(weight, given[0]) is not None and weight.is_contiguous():
            rows = max(1, self.outputs)  # at once: then threads pack what they will read
        for first in range(0, self.outputs, rows):
            self._pack(weight[first : first + rows].detach(), first, *given)

    def _pack(self, part: torch.Tensor, first: int, scales: Levels | None, offsets: Levels | None) -> None:
        """Pack the outputs from `first` on, after all before them, so that weights are never converted as a whole."""
        if self._type(part, scales) is None:  # numbers of 8 bits are exact in bfloat16
            part = part.to(torch.bfloat16 if part.dtype in (torch.int8, torch.uint8) else torch.float32)
        part = part.contiguous()
        matrix = self._part(first, len(part))
        floats = [None if each is None else each.floats for each in (scales, offsets)]
        steps = [None if each is None else each.steps for each in (scales, offsets)]
        given = (None if each is None else each[first:].data_ptr() for each in (*floats, *steps))
        if not _kernels().pack(ctypes.addressof(matrix), part.data_ptr(), self._type(part, scales), *given):
            raise UnfitWeightError(_UNFIT)

    def _type(self, weight: torch.Tensor, scales: Levels | None) -> int | None:
        """Return the kernel's number for a type that it packs as it is, or None: floats, whole words of scaled int8."""
        if weight.dtype == torch.int8 and scales is not None and self.inputs % 4 == 0:
            return _BYTES
        return _TYPES.get(weight.dtype)

    @classmethod
    def empty(cls, outputs: int, inputs: int, form: Form, workspace: Workspace) -> PackedMatrix:
        """Make a weight [outputs, inputs] whose rows are filled in later by `put` or `put_blocks`."""
        made = cls.__new__(cls)
        packed = weight_memory((form.packed_bytes(outputs, inputs),), torch.uint8)
        made._set_up(packed, None, (outputs, inputs), form, None, workspace)
        return made

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Quantize `rows` [count, k] as the outputs from `first` on. Raises UnfitWeightError.

        Both numbers are multiples of `PANEL`, if these rows are not the last ones.
        """
        self._pack(rows.detach(), first, None, None)

    def put_blocks(self, first: int, kind: int, rows: torch.Tensor) -> float:
        """Pack the blocks of a GGUF file, uint8 [count, bytes], as the outputs from `first` on; numbers as for `put`.

        Each panel is read and packed while its numbers are in the cache. Returns the largest scale or offset without
        its sign, NaN where one is. Raises ValueError for blocks that are not of the form, and as `blocks.read`.
        """
        shape, n, count, told = blocks.given(kind, rows)
        form, matrix = self.form, self._part(first, n)
        groups = form.block // form.group if form.steps else 0
        alike = (shape.numbers, shape.groups, bool(shape.offsets)) == (form.block or form.group, groups, form.offsets)
        if not alike or count * shape.numbers != self.inputs or form.widths(self.inputs)[1] != self.inputs:
            raise ValueError(f"blocks of the type {kind} are not a weight of {self.inputs} inputs in {form}")
        kind, address, across, _, _ = told
        return float(_kernels().pack_blocks(ctypes.addressof(matrix), kind, address, across, count))

    def put_fp8(
        self, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
    ) -> None:
        """Quantize all outputs, which are fp8 (e4m3) [n, k].

        `scales` are of each output [n], or of each `block` of outputs and inputs. A weight times its scale is rounded
        to bfloat16 before, unless `dtype` is float32. Raises UnfitWeightError.
        """
        tall, step = block or (1, max(1, self.inputs))
        given = weight.detach().view(torch.uint8).contiguous()
        scales = scales.detach().view(len(scales), -1).float().contiguous()
        needed = -(-self.outputs // tall), -(-self.inputs // step)
        if given.shape != (self.outputs, self.inputs) or scales.shape != needed:
            raise ValueError(f"fp8 {list(weight.shape)} with scales {list(scales.shape)} is not such a weight")
        told = scales.data_ptr(), tall, step, scales.shape[1], dtype != torch.float32
        if not _kernels().pack_fp8(self._address, given.data_ptr(), *told):
            raise UnfitWeightError(_UNFIT)

    def _part(self, first: int, count: int) -> _Matrix:
        """Return the kernel's structure for `count` outputs from `first` on.

        Raises ValueError where `first` does not begin a panel or the outputs do not exist.
        """
        if first < 0 or first % PANEL or first + count > self.outputs:
            raise ValueError(f"{count} outputs from {first} on are not whole panels of {self.outputs}")
        matrix = _Matrix.from_buffer_copy(self._matrix)
        matrix.weights, matrix.n = matrix.weights + self.form.packed_bytes(first, self.inputs), count
        return matrix

    def add_bias(self, bias: torch.Tensor | None) -> None:
        """Set the bias [n] that products add, or none."""
        self._bias = None if bias is None else _channels(bias)
        self._matrix.bias = _at(self._bias)

    @classmethod
    def of_packed(
        cls,
        packed: torch.Tensor,
        factors: torch.Tensor | None,
        shape: tuple[int, int],
        form: Form,
        bias: torch.Tensor | None,
        workspace: Workspace,
        turn: bool = False,
    ) -> PackedMatrix:
        """Make a matrix of `shape` from the `packed` and `factors` of an earlier matrix.

        With `turn`, that matrix was packed on a processor with the other of `ferrule_kernels.cpu.packed.LAYOUTS`;
        `packed` is then converted in place. Raises ValueError for another type or size.
        """
        for given, dtype, count in (
            (packed, torch.uint8, form.packed_bytes(*shape)),
            (factors, torch.float32, shape[0] + -shape[0] % LANES),
        ):
            if given is not None and (given.dtype != dtype or tuple(given.shape) != (count,)):
                found = f"{given.dtype} {list(given.shape)}"
                raise ValueError(f"a packed weight {shape} has {dtype} [{count}], not {found}")
        made = cls.__new__(cls)
        made._set_up(packed.contiguous(), factors, shape, form, bias, workspace)
        if turn:
            _kernels().turn(made._address)
        return made

    def _set_up(
        self,
        packed: torch.Tensor,
        factors: torch.Tensor | None,
        shape: tuple[int, ...],
        form: Form,
        bias: torch.Tensor | None,
        workspace: Workspace,
    ) -> None:
        self._multiply, self._memory = _kernels().multiply, _kernels().memory
        self.outputs, self.inputs = shape
        if form.problem is not None:
            raise ValueError(form.problem)
        group, padded = form.widths(self.inputs)
        if group > LONGEST:
            raise ValueError(f"a group of {group} inputs is more than the {LONGEST} whose sums are exact")
        self.form, self.packed, self.factors = form, packed, factors
        self._workspace = workspace
        sizes = self.outputs, padded, self.inputs, group, form.block or group
        kind = form.bits, form.digits, form.offsets, bool(form.table), form.halves, form.steps
        table = (ctypes.c_uint8 * 16)(*(number + 128 for number in form.table))
        self._matrix = _Matrix(packed.data_ptr(), None, *sizes, *kind, _at(factors), table)
        self.add_bias(bias)
        self._address = ctypes.addressof(self._matrix)

    @property
    def address(self) -> int:
        """Address of the kernel's structure, valid as long as this matrix lives."""
        return self._address

    def memory(self, rows: int, products: int = 1) -> int:
        """Return the address of memory for `rows` rows in each of `products` products, valid until the next call."""
        return self._workspace.at(self._memory(self._address, rows, products))

    @staticmethod
    def memory_of(matrices: Sequence[PackedMatrix], rows: int) -> int:
        """Return the address of memory for `rows` rows in a product with each matrix, valid until the next call."""
        return matrices[0]._workspace.at(sum(each._memory(each._address, rows, 1) for each in matrices))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return every tensor that the kernel reads."""
        return tuple(tensor for tensor in (self.packed, self._bias, self.factors) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def multiply(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiply x [m, k] by the transposed weight: [m, n] of `dtype`, by default x's."""
        wanted = dtype or x.dtype
        if x.dtype not in _TYPES:
            x = x.float()
        made = wanted if wanted in _TYPES else torch.float32
        x = x.contiguous()
        m = x.shape[0]
        y = torch.empty((m, self.outputs), dtype=made)
        memory = self.memory(m)
        self._multiply(self._address, x.data_ptr(), y.data_ptr(), m, _TYPES[x.dtype], _TYPES[made], memory)
        return y if made == wanted else y.to(wanted)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of the rows `ids` [tokens] of the weight, [tokens, k] of `dtype`. Raises IndexError."""
        ids = ids.long().contiguous()
        made = dtype if dtype in _TYPES else torch.float32
        y = torch.empty((*ids.shape, self.inputs), dtype=made)
        read = _kernels().rows(self._address, ids.data_ptr(), ids.numel(), _TYPES[made], y.data_ptr())
        check_rows(ids, read, self.outputs)
        return y if made == dtype else y.to(dtype)


def _kept(values: torch.Tensor | Levels, form: Form) -> Levels:
    """Round levels to 16-bit floats and int8 steps, as the kernel reads them.

    Raises ValueError where steps are given for a form without them, or missing.
    """
    given = values if isinstance(values, Levels) else Levels(values)
    if bool(form.steps) != (given.steps is not None):
        raise ValueError("groups have steps where their form says so")
    floats = given.floats.detach().to(torch.float16 if form.halves else torch.bfloat16).float().contiguous()
    return Levels(floats, None if given.steps is None else given.steps.detach().to(torch.int8).contiguous())


def _channels(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values.detach().float(), (0, -values.numel() % LANES))


def _lost(scales: torch.Tensor, kept: Levels) -> torch.Tensor | None:
    """Return the factor of each channel by which rounding changed scales [n, groups].

    Returns None if no scale changed, or if channels have several groups.
    """
    scales, rounded = scales.detach().float(), kept.floats
    if scales.shape[1] > 1 or torch.equal(scales, rounded):
        return None
    return _channels(torch.where(rounded == 0, 1.0, scales / rounded)[:, 0])


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
