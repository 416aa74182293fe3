"""Weights as whole numbers in groups of inputs, and the layouts in which GPTQ's and AWQ's checkpoints have them.

A weight is (number - zero) * scale; scales are float16. `ferrule_plugins.quantization.groupwise` reads both layouts:

    gptq   https://github.com/AutoGPTQ/AutoGPTQ: words of inputs, lowest bits first; zero points along the outputs, less
           one; `g_idx` is the group of each input
    awq    https://github.com/casper-hansen/AutoAWQ, "gemm": words of eight outputs, in the order 0 2 4 6 1 3 5 7
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule_quant.packed_words import AWQ_ORDER, per_words

_WORD = 32


@dataclass(frozen=True)
class Numbers:
    """`numbers` [outputs, inputs], `zeros` and `scales` [outputs, groups]; `index` [inputs] is each input's group."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    index: torch.Tensor

    @property
    def restored(self) -> torch.Tensor:
        """The weights that are meant, float32."""
        return (self.numbers - self.zeros[:, self.index]).float() * self.scales[:, self.index]

    def of(self, rows: torch.Tensor | slice) -> Numbers:
        return Numbers(self.numbers[rows], self.zeros[rows], self.scales[rows], self.index)


def float16(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to float16; none becomes zero, even where all weights are. Raises CheckpointError."""
    kept = scales.half().float()
    if not torch.isfinite(kept).all():
        raise CheckpointError("The weights are too large: float16 has no scale for them.")
    return torch.where(kept == 0, torch.ones_like(kept), kept)


class Layout(ABC):
    """A layout in which a layer's numbers are written. `per` numbers fill whole words of 32 bits."""

    bits: int
    group: int

    @property
    def per(self) -> int:
        return per_words(self.bits)[0]

    def problem(self, outputs: int, inputs: int) -> str | None:
        """Return why a layer of this size cannot be quantized; None when it can."""
        if inputs % self.group or inputs % self.per:
            return f"{inputs} inputs are not a whole number of groups of {self.group}, or of words"
        return f"{outputs} outputs do not fill words of {self.per} numbers" if outputs % self.per else None

    @abstractmethod
    def forms(self, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        """Return a layer's tensors on the meta device, with types and shapes, by suffixes of its name."""

    @abstractmethod
    def tensors(self, numbers: Numbers) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint in which the `ignored` layers stay floats."""


class GptqLayout(Layout):
    def __init__(self, bits: int, group: int, ordered: bool) -> None:
        self.bits, self.group, self.ordered = bits, group, ordered

    def forms(self, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        groups = inputs // self.group
        return {
            "qweight": _form((inputs * self.bits // _WORD, outputs)),
            "qzeros": _form((groups, outputs * self.bits // _WORD)),
            "scales": _form((groups, outputs), torch.float16),
            "g_idx": _form((inputs,)),
        }

    def tensors(self, numbers: Numbers) -> dict[str, torch.Tensor]:
        return {
            "qweight": packed(numbers.numbers, self.bits).t().contiguous(),
            "qzeros": packed((numbers.zeros - 1).t(), self.bits),
            "scales": numbers.scales.t().half().contiguous(),
            "g_idx": numbers.index.to(torch.int32),
        }

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.ordered,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
        left: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in ignored if name != "lm_head"}
        return {**config, "dynamic": left} if left else config


class AwqLayout(Layout):
    bits = 4

    def __init__(self, group: int) -> None:
        self.group = group

    def forms(self, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        groups = inputs // self.group
        return {
            "qweight": _form((inputs, outputs // 8)),
            "qzeros": _form((groups, outputs // 8)),
            "scales": _form((groups, outputs), torch.float16),
        }

    def tensors(self, numbers: Numbers) -> dict[str, torch.Tensor]:
        def along_outputs(values: torch.Tensor) -> torch.Tensor:
            return packed(values.t().reshape(values.shape[1], -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4)

        return {
            "qweight": along_outputs(numbers.numbers),
            "qzeros": along_outputs(numbers.zeros),
            "scales": numbers.scales.t().half().contiguous(),
        }

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "modules_to_not_convert": list(ignored),
        }


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers [rows, numbers] into words of 32 bits [rows, words], lowest bits first.

    A number may reach into the next word.
    """
    per, across = per_words(bits)
    parts = numbers.to(torch.int64).reshape(len(numbers), -1, per)
    words = torch.zeros((*parts.shape[:2], across), dtype=torch.int64)
    for place in range(per):
        word, shift = divmod(place * bits, _WORD)
        words[..., word] |= parts[..., place] << shift
        if shift + bits > _WORD:
            words[..., word + 1] |= parts[..., place] >> (_WORD - shift)
    words &= (1 << _WORD) - 1
    return torch.where(words >= 1 << (_WORD - 1), words - (1 << _WORD), words).to(torch.int32).flatten(1)


def _form(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def output_error(change: torch.Tensor, products: torch.Tensor) -> float:
    """Return the sum of squares by which outputs change when the weights change by `change` [outputs, inputs].

    `products` is the sum of x xᵀ over the inputs x.
    """
    return float(((change @ products) * change).sum())
