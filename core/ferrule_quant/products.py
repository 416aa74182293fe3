"""The layout of quantized weights and the products with them: one place for all methods and formats.

A scheme says what the weights are, as integers with scales, as fp8 with scales, or as floats. `Products` lay them out
and multiply by them: these by torch, and those that a platform supplies by its kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ferrule import log
from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearScheme
from ferrule_kernels import matmul as reference
from ferrule_kernels.cpu.matmul import UnfitWeightError
from ferrule_kernels.matmul import Form
from ferrule_kernels.tables import Additive, Palette
from ferrule_nn import Dense
from ferrule_quant.weights import Integers as Integers
from ferrule_quant.weights import Levelled as Levelled
from ferrule_quant.weights import gathered, looked_up, sorted_by_group

_log = log.get("quantization")
_DAMAGED = "The file may be damaged."
GROUPS = 8  # inputs of a group of the CPU's kernel are a multiple of it
FP8_FORM = Form(bits=8, group=32)  # of fp8 weights on CPUs, whose kernels multiply integers
FP8_MOST = 448  # the largest number of e4m3
_ROWS = 4096  # that torch quantizes at a time
Product = Callable[[Any, torch.Tensor], torch.Tensor]  # of a layer and activations [tokens, in]
Weights: TypeAlias = "Integers | Levelled | Rounded | Fp8 | Wide | Tables"  # that a scheme has


@dataclass(frozen=True)
class Wide:
    """Weights [n, k] that no kernel multiplies in fewer bits, and that are floats from here on. `why` is logged."""

    weight: torch.Tensor
    why: str


@dataclass(frozen=True)
class Tables:
    """Weights [n, k] that are looked up, of each of the layer's projections.

    Where no kernel looks them up, they are widened, and `why` is logged.
    """

    projections: tuple[Palette | Additive, ...]
    why: str

    def widened(self, dtype: torch.dtype) -> Wide:
        return Wide(torch.cat([each.weights().to(dtype) for each in self.projections]), self.why)

    def floats(self) -> Iterable[torch.Tensor]:
        """Yield all tensors of numbers."""
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
        """Quantize the weights with torch, to the same numbers as the CPU's kernels."""
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
        """Return the weights that the numbers stand for, [n, k]."""
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
    """The form of weights that are widened as they load, which states how much memory they take."""

    dtype: torch.dtype

    def packed_bytes(self, outputs: int, inputs: int) -> int:
        return outputs * inputs * self.dtype.itemsize


def kept_bits(bits: int, group: int) -> int:
    """Return how many bits the CPU's kernel uses for numbers of `bits` bits, in groups of `group` inputs, 0 for all."""
    return next(each for each in (2, 3, 4, 5, 6, 8) if each >= bits and group % Form(each).unit == 0)


def kept(bits: int, group: int, wide: bool, offsets: bool, table: tuple[int, ...] = ()) -> Form:
    """Return the form in which the CPU's kernel stores numbers of `bits` bits, in groups of inputs, 0 for all."""
    whole = -(-group // GROUPS) * GROUPS
    return Form(kept_bits(bits, whole), whole, 2 if wide else 1, offsets, table)


def has_room(bits: int, group: int) -> bool:
    """Return whether numbers of `bits` bits can be shifted, so that zero points need no offsets."""
    return kept_bits(bits, -(-group // GROUPS) * GROUPS) > bits


@contextmanager
def fitting() -> Iterator[None]:
    """Raise CheckpointError for weights that cannot be quantized."""
    try:
        yield
    except UnfitWeightError as error:
        raise CheckpointError(f"The weights cannot be quantized: {error}.", _DAMAGED) from None


def free(layer: Any) -> None:
    """Free the memory of a layer's parameters, except the bias. An empty parameter still has the layer's device."""
    for name, own in list(layer.named_parameters(recurse=False)):
        if name != "bias":
            setattr(layer, name, torch.nn.Parameter(own.data.new_empty(0), requires_grad=False))


class Shared:
    """The state that the layers of one model share: the log lines that appear only once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Log a line, the first time only."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)


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
        self.matrix: Any = None  # what a kernel packed that has banks of such matrices, and reads their rows
        self.coming: Any = None  # a matrix of which not all rows may be there
        self.unpacked: tuple[torch.Tensor, ...] = ()  # what else is multiplied by
        self._product: Product | None = None

    @abstractmethod
    def weights(self, layer: Any) -> Weights:
        """Return the weights in the layer's parameters. Raises CheckpointError for invalid ones."""

    def pack(self, layer: Any) -> None:
        products = products_of(layer)
        if self.coming is not None:
            free(layer)
            coming, self.coming = self.coming, None
            self._product = products.filled(self, layer, coming)
            return
        weights = products.taken(self.weights(layer))
        for values in _floats_of(weights):
            check_scales(values, self.given)
        free(layer)
        self._product = products.product(self, layer, weights)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        tensors: Iterable[torch.Tensor] = self.unpacked if self.matrix is None else self.matrix.tensors()
        return tensors

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self._product is None:
            raise RuntimeError("a quantized layer multiplies once its weights are packed")
        return self._product(layer, x)


class Products:
    """The products of a device with quantized weights. This class uses torch: the definition, on any device.

    A platform's part of `Kernels` derives from it and overrides the products that it has kernels for.
    """

    compiled = False  # whether rows are packed as they come, also those of GGUF's blocks, and tables are looked up
    keeps_fp8 = False  # whether float weights become fp8, where the user wishes for that, and not integers
    looks_up = True  # whether codes of 4 bits are multiplied, and not floats in their place
    any_type = True  # whether activations may be float32, whatever the model's type is

    def __init__(self, why: str = "this device has no kernels for them") -> None:
        self._why = why

    def taken(self, weights: Weights) -> Weights:
        """Return the weights in a form that `product` multiplies by."""
        return weights.integers() if isinstance(weights, Rounded) else weights

    def product(self, scheme: Quantized, layer: Any, weights: Weights) -> Product:
        """Lay the weights out and return the product with them. The layer's own parameters are gone then."""
        if isinstance(weights, Wide):
            return self.widened(scheme, layer, weights)
        if isinstance(weights, Tables):
            return self.tables(scheme, layer, weights)
        if isinstance(weights, Fp8):
            return self.fp8(scheme, layer, weights)
        if isinstance(weights, Levelled):
            return self.levelled(scheme, layer, weights)
        if isinstance(weights, Rounded):
            return self.rounded(scheme, layer, weights)
        return self.integers(scheme, layer, weights)

    def coming_rows(self, scheme: Quantized, layer: Any, form: Form) -> Any:
        """Return the matrix into which rows are packed as they are loaded; None where no kernel does that."""
        return None

    def empty(self, layer: Any, form: Form) -> Any:
        """Make the matrix of a layer, without rows. Called only where rows of GGUF's blocks are packed as they are."""
        raise RuntimeError(self._why)

    def filled(self, scheme: Quantized, layer: Any, matrix: Any) -> Product:
        """Return the product with a matrix whose rows are all loaded."""
        raise RuntimeError(self._why)

    def integers(self, scheme: Quantized, layer: Any, weights: Integers) -> Product:
        """Return the product with integers. Zero points become offsets of groups."""
        weights, order = sorted_by_group(weights, multiple=GROUPS)
        half = 1 << (kept_bits(weights.bits, weights.group) - 1)
        if weights.table:
            numbers, added = weights.numbers.to(torch.int8), weights.offsets
        else:
            numbers, added = weights.fitted(max(-half, -127), half - 1)
        form = kept(weights.bits, weights.group, scheme.wide, added is not None, weights.table)
        product = self.quantized(scheme, layer, form, reference.Quantized(numbers, weights.scales, added))
        return product if order is None else self._reordered(scheme, layer, product, order)

    def levelled(self, scheme: Quantized, layer: Any, weights: Levelled) -> Product:
        """Return the product with weights that have the levels of a file's blocks."""
        added = None if weights.offsets is None else weights.offsets.spread()
        given = reference.Quantized(weights.numbers, weights.scales.spread(), added)
        return self.quantized(scheme, layer, weights.form, given)

    def rounded(self, scheme: Quantized, layer: Any, weights: Rounded) -> Product:
        """Return the product with float weights, quantized here."""
        return self.integers(scheme, layer, weights.integers())

    def fp8(self, scheme: Quantized, layer: Any, weights: Fp8) -> Product:
        """Return the product with fp8 weights, as integers with a scale for each 32 inputs.

        An integer is nearer to an fp8 number than this is to its float.
        """
        check_scales(weights.scales * FP8_MOST)
        checked(weights.numbers)
        form, dtype = fp8_form(scheme)
        return self.integers(scheme, layer, Rounded(weights.widened(dtype), form).integers())

    def tables(self, scheme: Quantized, layer: Any, weights: Tables) -> Product:
        """Return the product with weights that are looked up."""
        return self.widened(scheme, layer, weights.widened(scheme.given))

    def quantized(self, scheme: Quantized, layer: Any, form: Form, given: reference.Quantized) -> Product:
        """Return the product with `given`, whose numbers or codes are [n, k]."""
        scheme.shared.say(f"quantized weights are multiplied by torch, many times slower: {self._why}")
        numbers = looked_up(form.table, given.numbers)
        group, padded = form.widths(numbers.shape[1])
        cells = torch.nn.functional.pad(numbers, (0, padded - numbers.shape[1])).view(numbers.shape[0], -1, group)
        weight = replace(given, numbers=cells)
        scheme.unpacked = tuple(each for each in (cells, given.scales, given.offsets) if each is not None)
        return lambda layer, x: reference.multiply(x, weight, form, layer.bias).to(scheme.dtype or x.dtype)

    def widened(self, scheme: Quantized, layer: Any, weights: Wide) -> Product:
        """Turn the layer into a float layer, whose experts can be stacked, and return its product."""
        scheme.shared.say(weights.why)
        layer.weight = torch.nn.Parameter(weights.weight, requires_grad=False)
        dense = Dense()
        dense.pack(layer)
        layer.scheme, layer.quantized = dense, False
        scheme.matrix, scheme.unpacked = dense.matrix, tuple(dense.packed_tensors())
        return dense.matmul

    def _reordered(self, scheme: Quantized, layer: Any, product: Product, order: torch.Tensor) -> Product:
        """Return the product with activations in another order of columns, which the `matrix` alone does not give."""
        scheme.unpacked = (*scheme.packed_tensors(), order)
        scheme.matrix, padded = None, bool((order == layer.in_features).any())
        return lambda layer, x: product(layer, gathered(x, order, padded))


_TORCH = Products()


def products_of(layer: Any) -> Products:
    """Return the products with quantized weights of a layer's device."""
    return layer.kernels.part(Products) or _TORCH


def fp8_form(scheme: Quantized) -> tuple[Form, torch.dtype]:
    """Return the form of fp8 weights as integers, and the type of the floats in between."""
    form = replace(FP8_FORM, digits=2 if scheme.wide else 1)
    return form, torch.float32 if scheme.given == torch.float32 else torch.bfloat16


def _floats_of(weights: Weights) -> Iterable[torch.Tensor]:
    """Return the tensors whose numbers must be finite."""
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
    """Return the fp8 numbers of a checkpoint. Raises CheckpointError if one is NaN."""
    if bool(((numbers.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError("A quantized weight of the checkpoint is NaN.", _DAMAGED)
    return numbers


def check_scales(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Check that scales are finite as they are stored: as bfloat16, then as `dtype`. Raises CheckpointError."""
    most = scales.float().abs().amax().bfloat16().to(dtype) if scales.numel() else scales  # NaN is the largest of all
    if not bool(most.isfinite().all()):
        raise CheckpointError("A scale of the checkpoint's quantized weights is not a finite number.", _DAMAGED)


def cannot_run(dtype: torch.dtype) -> str | None:
    """Return why quantized weights are not multiplied by activations of `dtype`, or None."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    return None
