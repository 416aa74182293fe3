"""How quantized weights are laid out and multiplied on each kind of device: one place for all methods and formats.

A scheme says what the weights are, as integers with scales, as fp8 with scales, or as floats. Here they are laid out
for the kernel of the device, and multiplied by. On a GPU they are buffers of the layer, so whatever moves a model moves
them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from ferrule import log
from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearScheme
from ferrule_kernels import matmul as reference
from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PANEL, PackedMatrix, UnfitWeightError, Workspace
from ferrule_kernels.cpu.pages import memory_nodes
from ferrule_kernels.cpu.tables import MergedTables
from ferrule_kernels.matmul import Form
from ferrule_kernels.tables import Additive, Palette
from ferrule_nn import Dense
from ferrule_quant.weights import Integers as Integers
from ferrule_quant.weights import Levelled as Levelled
from ferrule_quant.weights import gathered, looked_up, sorted_by_group

_log = log.get("quantization")
_DAMAGED = "The file may be damaged."
_FP8_UNITS = (8, 9)  # the first compute capability that has them
GROUPS = 8  # inputs of a group of the CPU's kernel are a multiple of it
FP8_FORM = Form(bits=8, group=32)  # of fp8 weights on CPUs, whose kernels multiply integers
_FP8_MOST = 448  # the largest number of e4m3
_ROWS = 4096  # that torch quantizes at a time
_BLOCK = 128  # inputs that have a scale in the GPU's kernels for blocks
_WHY_BLOCKS = (
    f"no GPU kernel multiplies fp8 whose scales are not for {_BLOCK} inputs: such weights take 16 bits, or 32 with"
    " --dtype float32"
)
Product = Callable[[Any, torch.Tensor], torch.Tensor]  # of a layer and activations [tokens, in]
Weights: TypeAlias = "Integers | Levelled | Rounded | Fp8 | Wide | Tables"  # that a scheme has


@dataclass(frozen=True)
class Wide:
    """Weights [n, k] that no kernel multiplies in fewer bits: floats from here on. `why` is said in the log."""

    weight: torch.Tensor
    why: str


@dataclass(frozen=True)
class Tables:
    """Weights [n, k] that are looked up, of each of the layer's projections. Where no kernel looks them up, they are
    widened, and `why` is said."""

    projections: tuple[Palette | Additive, ...]
    why: str

    def widened(self, dtype: torch.dtype) -> Wide:
        return Wide(torch.cat([each.weights().to(dtype) for each in self.projections]), self.why)

    def floats(self) -> Iterable[torch.Tensor]:
        """All numbers."""
        for each in self.projections:
            yield from (each.table,) if isinstance(each, Palette) else (each.books,)
            if isinstance(each, Additive) and each.scales is not None:
                yield each.scales


@dataclass(frozen=True)
class Rounded:
    """Float weights [n, k] that become the nearest numbers of `form`, which has no offsets and no table."""

    weight: torch.Tensor
    form: Form

    def integers(self) -> Integers:
        """By torch: to the same numbers as by the CPU's kernels."""
        starts = range(0, len(self.weight), _ROWS)
        chunks = [reference.quantize(self.weight[first : first + _ROWS], self.form) for first in starts]
        numbers = torch.cat([chunk.numbers for chunk in chunks]).flatten(1)[:, : self.weight.shape[1]]
        scales = torch.cat([chunk.scales for chunk in chunks])
        if self.form.bits < 8:
            numbers = (numbers + (1 << (self.form.bits - 1))).to(torch.uint8)
        return Integers(numbers, scales, None, self.form.bits, self.form.group)


@dataclass(frozen=True)
class Fp8:
    """Weights fp8 e4m3 [n, k], with scales float32 [n], or [blocks of `tall` outputs, blocks of `step` inputs]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    tall: int = 0
    step: int = 128

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """What they stand for, [n, k]."""
        if not self.tall:
            return (self.numbers.float() * self.scales[:, None]).to(dtype)
        n, k = self.numbers.shape
        out = torch.empty((n, k), dtype=dtype, device=self.numbers.device)
        for first in range(0, n, _ROWS):  # no second matrix of float32
            numbers = self.numbers[first : first + _ROWS].float()
            blocks = torch.arange(first, first + len(numbers), device=numbers.device) // self.tall
            spread = self.scales[blocks].repeat_interleave(self.step, 1)[:, :k]
            out[first : first + _ROWS] = (numbers * spread).to(dtype)
        return out

    @property
    def block(self) -> tuple[int, int] | None:
        """The outputs and inputs that share a scale; None where all inputs of an output do."""
        return (self.tall, self.step) if self.tall else None


@dataclass(frozen=True)
class Floats:
    """The form of weights that are widened as they load: it says how much memory they take."""

    dtype: torch.dtype

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        return outputs * inputs * self.dtype.itemsize


def kept_bits(bits: int, group: int) -> int:
    """How many the CPU's kernel keeps numbers of so many bits in, in groups of so many inputs, 0 for all."""
    return next(each for each in (2, 3, 4, 5, 6, 8) if each >= bits and group % Form(each).unit == 0)


def kept(bits: int, group: int, wide: bool, offsets: bool, table: tuple[int, ...] = ()) -> Form:
    """How the CPU's kernel keeps numbers of so many bits, in groups of so many inputs, 0 for all."""
    whole = -(-group // GROUPS) * GROUPS
    return Form(kept_bits(bits, whole), whole, 2 if wide else 1, offsets, table)


def has_room(bits: int, group: int) -> bool:
    """Whether numbers of so many bits can be moved, so that they need no offsets for zero points."""
    return kept_bits(bits, -(-group // GROUPS) * GROUPS) > bits


class Shared:
    """What the layers of one model share: working memory, and log lines that appear once."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._compiled: bool | None = None
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """A line of the log, the first time."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)

    def compiled(self) -> bool:
        """Whether the CPU's compiled kernels can be loaded. The log says what follows if not."""
        if self._compiled is None:
            try:
                library.load()
            except library.KernelsUnavailableError as error:
                self.say(f"quantized weights are multiplied by torch, many times slower: {error}")
                self._compiled = False
            else:
                self._compiled = True
        return self._compiled


@contextmanager
def fitting() -> Iterator[None]:
    """Raise CheckpointError for weights that cannot be quantized."""
    try:
        yield
    except UnfitWeightError as error:
        raise CheckpointError(f"The weights cannot be quantized: {error}.", _DAMAGED) from None


def free(layer: Any) -> None:
    """Give the memory of a layer's parameters back, but the bias'. An empty parameter still has the layer's device."""
    for name, own in list(layer.named_parameters(recurse=False)):
        if name != "bias":
            setattr(layer, name, torch.nn.Parameter(own.data.new_empty(0), requires_grad=False))


class Quantized(LinearScheme):
    """A scheme that packs what `weights` returns for a layer with loaded parameters.

    `wide` activations keep their type, or on a CPU 15 bits; else they are quantized as the weights are, where the
    device multiplies such numbers. `dtype` is that of the result, by default the activations'.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None = None, wide: bool = False) -> None:
        self.shared = shared
        self.dtype = dtype
        self.wide = wide
        self.given = torch.get_default_dtype()  # the activations', where `allocate` does not know better
        self.matrix: DenseMatrix | PackedMatrix | None = None  # on a CPU that has compiled kernels
        self._coming: PackedMatrix | None = None  # of which not all rows may be there
        self._unpacked: tuple[torch.Tensor, ...] = ()  # on a CPU without them
        self._product: Product | None = None

    @abstractmethod
    def weights(self, layer: Any) -> Weights:
        """What the layer's parameters hold. Raises CheckpointError for what they may not."""

    def pack(self, layer: Any) -> None:
        if self._coming is not None:
            free(layer)
            self._product, self._coming = self._filled(layer, self._coming), None
            return
        device = next(layer.parameters()).device.type
        weights = self.weights(layer)
        if isinstance(weights, Levelled) and device != "cpu":
            weights = weights.integers()
        if isinstance(weights, Rounded) and not (device == "cpu" and self.shared.compiled()):
            weights = weights.integers()
        for values in _floats_of(weights):
            check_scales(values, self.given)
        free(layer)
        if isinstance(weights, Tables):
            self._product = self._tables(layer, weights, device)
        elif isinstance(weights, Wide):
            self._product = self._widened(layer, weights)
        elif isinstance(weights, Fp8):
            self._product = (self._fp8_cpu if device == "cpu" else self._fp8_cuda)(layer, weights)
        elif isinstance(weights, Levelled):
            self._product = self._levelled(layer, weights)
        elif isinstance(weights, Rounded):
            self._product = self._multiplied(self._quantized(layer, weights))
        else:
            self._product = self._cpu(layer, weights) if device == "cpu" else self._cuda(layer, weights)

    def compiles(self, layer: Any) -> bool:
        """Whether the CPU's kernel will multiply. A model on `meta`, which is only measured, counts as the CPU's."""
        device = getattr(layer, "device", layer.weight.device)  # weights for a GPU are on `meta` until they come
        return device.type != "cuda" and self.shared.compiled()

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return self._unpacked if self.matrix is None else self.matrix.tensors()

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self._product is None:
            raise RuntimeError("a quantized layer multiplies once its weights are packed")
        return self._product(layer, x)

    # ------------------------------------------------------------------------------------ CPUs

    def _coming_rows(self, layer: Any, form: Form) -> PackedMatrix | None:
        """The matrix into which rows are packed as they come. None where no kernel does that, where projections do not
        begin with a panel, and where memory has several nodes: there the kernel divides the whole matrix among
        threads as products do.
        """
        borders = list(accumulate(layer.projections.values()))[:-1]
        own = next(layer.parameters()).device.type == "cpu" and not any(border % PANEL for border in borders)
        if not own or len(memory_nodes()) > 1 or not self.shared.compiled():
            return None
        if self._coming is None:
            self._coming = self._empty(layer, form)
        return self._coming

    def _empty(self, layer: Any, form: Form) -> PackedMatrix:
        return PackedMatrix.empty(layer.out_features, layer.in_features, form, self.shared.workspace)

    def _quantized(self, layer: Any, weights: Rounded) -> PackedMatrix:
        with fitting():
            return PackedMatrix(weights.weight, weights.form, layer.bias, self.shared.workspace)

    def _filled(self, layer: Any, matrix: PackedMatrix) -> Product:
        """The product with a matrix whose rows are all there."""
        matrix.add_bias(layer.bias)
        return self._multiplied(matrix)

    def _fp8_cpu(self, layer: Any, weights: Fp8) -> Product:
        """As integers with a scale for each 32 inputs: nearer to an fp8 number than that is to its float."""
        check_scales(weights.scales * _FP8_MOST)
        form = replace(FP8_FORM, digits=2 if self.wide else 1)
        dtype = torch.float32 if self.given == torch.float32 else torch.bfloat16
        if not self.shared.compiled():
            checked(weights.numbers)
            return self._cpu(layer, Rounded(weights.widened(dtype), form).integers())
        matrix = self._empty(layer, form)
        with fitting():
            matrix.put_fp8(weights.numbers, weights.scales, weights.block, dtype)
        return self._filled(layer, matrix)

    def _cpu(self, layer: Any, weights: Integers) -> Product:
        """The kernel has no zero points: what they make of a group's weights is added to these."""
        weights, order = sorted_by_group(weights, multiple=GROUPS)
        half = 1 << (kept_bits(weights.bits, weights.group) - 1)
        if weights.table:
            numbers, added = weights.numbers.to(torch.int8), weights.offsets
        else:
            numbers, added = weights.fitted(max(-half, -127), half - 1)
        form = kept(weights.bits, weights.group, self.wide, added is not None, weights.table)
        given = reference.Quantized(numbers, weights.scales, added)
        product = (self._compiled if self.shared.compiled() else self._torch)(layer, form, given)
        return product if order is None else self._reordered(layer, product, order)

    def _compiled(self, layer: Any, form: Form, given: reference.Quantized) -> Product:
        workspace = self.shared.workspace
        return self._multiplied(PackedMatrix(given.numbers, form, layer.bias, workspace, given.scales, given.offsets))

    def _levelled(self, layer: Any, weights: Levelled) -> Product:
        form, scales, offsets = weights.form, weights.scales, weights.offsets
        if self.shared.compiled():
            matrix = PackedMatrix(weights.numbers, form, layer.bias, self.shared.workspace, scales, offsets)
            return self._multiplied(matrix)
        added = None if offsets is None else offsets.spread()
        return self._torch(layer, form, reference.Quantized(weights.numbers, scales.spread(), added))

    def _tables(self, layer: Any, weights: Tables, device: str) -> Product:
        if device != "cpu" or not self.shared.compiled():
            return self._widened(layer, weights.widened(self.given))
        matrix = MergedTables(weights.projections, self.given, layer.bias)
        self._unpacked = matrix.tensors()
        return lambda _, x: matrix.multiply(x, self.dtype)

    def _multiplied(self, matrix: PackedMatrix) -> Product:
        self.matrix = matrix
        return lambda _, x: matrix.multiply(x, self.dtype)

    def _reordered(self, layer: Any, product: Product, order: torch.Tensor) -> Product:
        """The product of activations whose columns stand otherwise: not one that the `matrix` alone gives."""
        self._unpacked = (*self.packed_tensors(), order)
        self.matrix, padded = None, bool((order == layer.in_features).any())
        return lambda layer, x: product(layer, gathered(x, order, padded))

    def _torch(self, layer: Any, form: Form, given: reference.Quantized) -> Product:
        """`given` has numbers or codes [n, k]."""
        numbers = looked_up(form.table, given.numbers)
        group, padded = form.widths(numbers.shape[1])
        cells = torch.nn.functional.pad(numbers, (0, padded - numbers.shape[1])).view(numbers.shape[0], -1, group)
        weight = replace(given, numbers=cells)
        self._unpacked = tuple(each for each in (cells, given.scales, given.offsets) if each is not None)
        return lambda layer, x: reference.multiply(x, weight, form, layer.bias).to(self.dtype or x.dtype)

    def _widened(self, layer: Any, weights: Wide) -> Product:
        """Make it a float layer from here on, whose experts can be stacked."""
        self.shared.say(weights.why)
        layer.weight = torch.nn.Parameter(weights.weight, requires_grad=False)
        dense = Dense()
        dense.pack(layer)
        layer.scheme, layer.quantized = dense, False
        self.matrix, self._unpacked = dense.matrix, tuple(dense.packed_tensors())
        return dense.matmul

    # ------------------------------------------------------------------------------------ GPUs

    def _keep(self, layer: Any, **tensors: torch.Tensor | None) -> None:
        for name, tensor in tensors.items():
            layer.register_buffer(f"packed_{name}", tensor, persistent=False)

    def _cuda(self, layer: Any, weights: Integers) -> Product:
        added = weights.added()
        floats = weights.zeros is not None and weights.zeros.is_floating_point() or weights.offsets is not None
        grouped = weights.scales.shape[1] > 1 or added is not None
        if weights.table or floats or weights.bits > 4 and (grouped or weights.bits < 8):
            what = "of a table" if weights.table else "with offsets" if floats else "in groups, or with zero points"
            form = f"{weights.bits} bits {what}"
            why = f"no GPU kernel multiplies integers of {form}: such weights take 16 bits, or 32 with --dtype float32"
            return self._widened(layer, Wide(weights.widened(self.given), why))
        if weights.bits == 8:
            from ferrule_kernels.cuda import int8

            self._keep(layer, numbers=weights.numbers.contiguous(), scales=weights.scales[:, 0].contiguous())
            multiply = int8.multiply_wide if self.wide else int8.multiply
            return lambda layer, x: multiply(x, layer.packed_numbers, layer.packed_scales, layer.bias, self.dtype)
        from ferrule_kernels.cuda import int4

        weights, order = sorted_by_group(weights, multiple=int4.QUARTER)
        shift = 8 - weights.middle  # fewer bits are numbers of four around the same middle
        zeros = None if weights.zeros is None or added is None else weights.zeros.to(torch.int32) + shift
        group = weights.group or weights.numbers.shape[1]
        packed = int4.pack(weights.numbers + shift, weights.scales.to(self.given), zeros, group)
        self._keep(layer, words=packed.words, scales=packed.scales, zeros=packed.zeros, order=order)
        packed_weight = partial(int4.Packed, group=packed.group, inputs=packed.inputs)
        padded = order is not None and bool((order == layer.in_features).any())

        def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
            if layer.packed_order is not None:
                x = gathered(x, layer.packed_order, padded)
            words, scales, zeros = layer.packed_words, layer.packed_scales, layer.packed_zeros
            return int4.multiply(x, packed_weight(words=words, scales=scales, zeros=zeros), layer.bias, self.dtype)

        return product

    def _fp8_cuda(self, layer: Any, weights: Fp8) -> Product:
        if weights.tall and weights.step != _BLOCK:
            return self._widened(layer, Wide(weights.widened(self.given), _WHY_BLOCKS))
        from ferrule_kernels.cuda import fp8

        self._keep(layer, numbers=weights.numbers.contiguous(), scales=weights.scales.contiguous())
        units = torch.cuda.get_device_capability(weights.numbers.device) >= _FP8_UNITS
        if not units and not self.wide:
            self.shared.say(
                "this GPU has no units for fp8: weights stay fp8, and are multiplied in the activations' type"
            )
        multiply = partial(fp8.multiply if units and not self.wide else fp8.multiply_wide, tall=weights.tall)
        return lambda layer, x: multiply(x, layer.packed_numbers, layer.packed_scales, layer.bias, self.dtype)


def _floats_of(weights: Weights) -> Iterable[torch.Tensor]:
    """What must be finite."""
    if isinstance(weights, Levelled):
        return (each.floats for each in (weights.scales, weights.offsets) if each is not None)
    if isinstance(weights, Tables):
        return weights.floats()
    if isinstance(weights, Rounded):
        return ()
    if isinstance(weights, Wide):
        return (weights.weight,)
    added = weights.added() if isinstance(weights, Integers) else None
    return (weights.scales,) if added is None else (weights.scales, added)


def checked(numbers: torch.Tensor) -> torch.Tensor:
    """fp8 numbers of a checkpoint. Raises CheckpointError for one that is NaN."""
    if bool(((numbers.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError("A quantized weight of the checkpoint is NaN.", _DAMAGED)
    return numbers


def check_scales(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raises CheckpointError for a scale that is not finite as it is kept: as bfloat16, float32 or `dtype`."""
    most = scales.float().abs().amax().bfloat16().to(dtype) if scales.numel() else scales  # NaN is the largest of all
    if not bool(most.isfinite().all()):
        raise CheckpointError("A scale of the checkpoint's quantized weights is not a finite number.", _DAMAGED)


def cannot_run(platform: str, dtype: torch.dtype) -> str | None:
    """Why no kernel multiplies quantized weights there, by activations of `dtype`."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if platform == "cuda":
        from ferrule_kernels import cuda

        return cuda.available()
    return None if platform == "cpu" else f"runs on CPUs and on NVIDIA GPUs, not on {platform}"
