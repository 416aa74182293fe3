"""How quantized weights are laid out and multiplied on each kind of device: one place for all methods and formats.

A scheme says what the weights are, as integers with scales or as fp8 with scales. Here they are laid out for the kernel
of the device, and multiplied by. On a GPU they are buffers of the layer, so whatever moves a model moves them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ferrule import log
from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearScheme
from ferrule_kernels import matmul as reference
from ferrule_kernels.cpu import library
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form
from ferrule_nn import Dense

_log = log.get("quantization")
_DAMAGED = "The file may be damaged."
_FP8_UNITS = (8, 9)  # the first compute capability that has them
Product = Callable[[Any, torch.Tensor], torch.Tensor]  # of a layer and activations [tokens, in]


@dataclass(frozen=True)
class Integers:
    """Weights (numbers - zeros) * scales of `bits`, 8 or 4, whose scales are for `group` inputs, 0 for all.

    Numbers of 8 bits are int8 [n, k] without zeros; of 4 bits uint8 from 0 to 15, and zeros uint8 [n, groups] from 0 to
    16, where None is 8. Scales are float32 [n, groups], as `offsets` that are added to weights without zeros.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int = 0
    offsets: torch.Tensor | None = None


@dataclass(frozen=True)
class Fp8:
    """Weights fp8 e4m3 [n, k], with scales float32 [n], or [blocks of `tall` outputs, blocks of 128 inputs]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    tall: int = 0

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """What they stand for, [n, k]."""
        if not self.tall:
            return (self.numbers.float() * self.scales[:, None]).to(dtype)
        n, k = self.numbers.shape
        out = torch.empty((n, k), dtype=dtype, device=self.numbers.device)
        for row, scales in enumerate(self.scales):  # block by block: no second matrix of float32
            rows = slice(row * self.tall, (row + 1) * self.tall)
            spread = scales.repeat_interleave(128)[:k]
            out[rows] = (self.numbers[rows].float() * spread).to(dtype)
        return out


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
        self._unpacked: tuple[torch.Tensor, ...] = ()  # on a CPU without them
        self._product: Product | None = None

    @abstractmethod
    def weights(self, layer: Any) -> Integers | Fp8:
        """What the layer's parameters hold. Raises CheckpointError for what they may not."""

    def pack(self, layer: Any) -> None:
        device = next(layer.parameters()).device.type
        weights = self.weights(layer)
        check_scales(weights.scales, self.given)
        if isinstance(weights, Integers) and weights.offsets is not None:
            check_scales(weights.offsets, self.given)
        for name, own in list(layer.named_parameters(recurse=False)):
            if name != "bias":  # an empty parameter still has the layer's device
                setattr(layer, name, torch.nn.Parameter(own.data.new_empty(0), requires_grad=False))
        if isinstance(weights, Fp8):
            self._product = self._fp8_cpu(layer, weights) if device == "cpu" else self._fp8_cuda(layer, weights)
        else:
            self._product = self._cpu(layer, weights) if device == "cpu" else self._cuda(layer, weights)

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        return self._unpacked if self.matrix is None else self.matrix.tensors()

    def matmul(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self._product is None:
            raise RuntimeError("a quantized layer multiplies once its weights are packed")
        return self._product(layer, x)

    # ------------------------------------------------------------------------------------ CPUs

    def _cpu(self, layer: Any, weights: Integers) -> Product:
        """Zero points need a ninth value for each of sixteen: such weights have 8 bits here."""
        digits, scales, added = 2 if self.wide else 1, weights.scales, weights.offsets is not None
        if weights.bits == 8:
            form, numbers = Form(8, weights.group, digits, added), weights.numbers.clamp(min=-127)
        elif weights.zeros is None:
            form, numbers = Form(4, weights.group, digits, added), weights.numbers.to(torch.int8) - 8
        else:
            form = Form(8, weights.group, digits)
            group, inputs = form.widths(weights.numbers.shape[1])[0], weights.numbers.shape[1]
            factors, scales = _factored(scales)
            zeros, factors = (part.repeat_interleave(group, 1)[:, :inputs] for part in (weights.zeros, factors))
            numbers = (weights.numbers.to(torch.int8) - zeros.to(torch.int8)) * factors
        if not self.shared.compiled():
            return self._torch(layer, form, reference.Quantized(numbers, scales, weights.offsets))
        workspace = self.shared.workspace
        self.matrix = matrix = PackedMatrix(numbers, form, layer.bias, workspace, scales, weights.offsets)
        return lambda _, x: matrix.multiply(x, self.dtype)

    def _torch(self, layer: Any, form: Form, given: reference.Quantized) -> Product:
        """`given` has numbers [n, k]."""
        numbers = given.numbers
        group, padded = form.widths(numbers.shape[1])
        cells = torch.nn.functional.pad(numbers, (0, padded - numbers.shape[1])).view(numbers.shape[0], -1, group)
        weight = replace(given, numbers=cells)
        self._unpacked = tuple(each for each in (cells, given.scales, given.offsets) if each is not None)
        return lambda layer, x: reference.multiply(x, weight, form, layer.bias).to(self.dtype or x.dtype)

    def _fp8_cpu(self, layer: Any, weights: Fp8) -> Product:
        self.shared.say("CPUs do not multiply fp8: such weights take 16 bits here, or 32 with --dtype float32")
        layer.weight = torch.nn.Parameter(weights.widened(self.given), requires_grad=False)
        dense = Dense()
        dense.pack(layer)
        self.matrix, self._unpacked = dense.matrix, tuple(dense.packed_tensors())
        return dense.matmul

    # ------------------------------------------------------------------------------------ GPUs

    def _keep(self, layer: Any, **tensors: torch.Tensor | None) -> None:
        for name, tensor in tensors.items():
            layer.register_buffer(f"packed_{name}", tensor, persistent=False)

    def _cuda(self, layer: Any, weights: Integers) -> Product:
        if weights.bits == 8:
            from ferrule_kernels.cuda import int8

            self._keep(layer, numbers=weights.numbers.contiguous(), scales=weights.scales[:, 0].contiguous())
            multiply = int8.multiply_wide if self.wide else int8.multiply
            return lambda layer, x: multiply(x, layer.packed_numbers, layer.packed_scales, layer.bias, self.dtype)
        from ferrule_kernels.cuda import int4

        group = weights.group or weights.numbers.shape[1]
        packed = int4.pack(weights.numbers, weights.scales.to(self.given), weights.zeros, group)
        self._keep(layer, words=packed.words, scales=packed.scales, zeros=packed.zeros)
        packed_weight = partial(int4.Packed, group=packed.group, inputs=packed.inputs)

        def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
            words, scales, zeros = layer.packed_words, layer.packed_scales, layer.packed_zeros
            return int4.multiply(x, packed_weight(words=words, scales=scales, zeros=zeros), layer.bias, self.dtype)

        return product

    def _fp8_cuda(self, layer: Any, weights: Fp8) -> Product:
        from ferrule_kernels.cuda import fp8

        self._keep(layer, numbers=weights.numbers.contiguous(), scales=weights.scales.contiguous())
        units = torch.cuda.get_device_capability(weights.numbers.device) >= _FP8_UNITS
        if not units and not self.wide:
            self.shared.say(
                "this GPU has no units for fp8: weights stay fp8, and are multiplied in the activations' type"
            )
        multiply = partial(fp8.multiply if units and not self.wide else fp8.multiply_wide, tall=weights.tall)
        return lambda layer, x: multiply(x, layer.packed_numbers, layer.packed_scales, layer.bias, self.dtype)


def _factored(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors int8 and scales whose products are `scales`, nearly.

    Numbers from -16 to 15 leave room for seven factors in 8 bits: the one whose scale loses least as bfloat16.
    """
    factors = torch.arange(1, 8, device=scales.device)
    rounded = (scales[..., None] / factors).bfloat16().float()
    best = (rounded * factors - scales[..., None]).abs().argmin(2, keepdim=True)
    return factors[best[..., 0]].to(torch.int8), rounded.gather(2, best)[..., 0]


def checked(numbers: torch.Tensor) -> torch.Tensor:
    """fp8 numbers of a checkpoint. Raises CheckpointError for one that is NaN."""
    if bool(((numbers.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError("A quantized weight of the checkpoint is NaN.", _DAMAGED)
    return numbers


def check_scales(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raises CheckpointError for a scale that is not finite as it is kept: as bfloat16, float32 or `dtype`."""
    if not bool(scales.bfloat16().to(dtype).isfinite().all()):
        raise CheckpointError("A scale of the checkpoint's quantized weights is not a finite number.", _DAMAGED)


def cannot_run(platform: str, dtype: torch.dtype) -> str | None:
    """Why no kernel multiplies quantized weights there, by activations of `dtype`."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if platform == "cuda":
        from ferrule_kernels import cuda

        return cuda.available()
    return None if platform == "cpu" else f"runs on CPUs and on NVIDIA GPUs, not on {platform}"
