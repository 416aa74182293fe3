"""Weights of few bits in groups of inputs, with scales and zero points: the common part of their formats."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrule_nn import checkpoint_parameter
from ferrule_quant.packed_words import check_words, outputs, per_words
from ferrule_quant.products import Integers, Quantized, Shared, Wide, has_room, kept

_APART = "projections that are one matrix here have inputs in different orders: they take 16 bits, or 32 with float32"


@dataclass(frozen=True)
class Settings:
    """The settings of one layer. A group of 0 is all inputs; with `ordered`, a group's inputs are not neighbours."""

    bits: int
    group: int
    ordered: bool = False
    symmetric: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], bits: tuple[int, ...] = tuple(range(1, 9))) -> Settings:
        """Read the settings from a checkpoint's configuration. Raises ValueError with what is not supported."""
        stated = config.get("bits", config.get("w_bit"))
        group = config.get("group_size", config.get("q_group_size"))
        ordered = config.get("desc_act") or False
        if type(stated) is not int or stated not in bits:
            raise ValueError(f"reads {', '.join(map(str, bits))} bits, and the checkpoint has {stated!r}")
        if group is not None and (type(group) is not int or group < -1 or group == 0):
            raise ValueError(f"takes groups of 1 input or more, and the group size is {group!r}")
        if not isinstance(ordered, bool):
            raise ValueError(f"finds a desc_act that is not true or false: {ordered!r}")
        size = 0 if group in (None, -1) else int(group)
        symmetric = config.get("sym") is True or config.get("zero_point") is False
        return cls(stated, size, ordered and size > 0, symmetric)


class Grouped(Quantized):
    """A scheme with the parameters `qweight`, `qzeros` and `scales`; with `wide`, activations keep their precision."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, settings: Settings, wide: bool = True) -> None:
        super().__init__(shared, dtype, wide)
        self.bits, self.group, self.ordered = settings.bits, settings.group, settings.ordered
        self.per = per_words(settings.bits)[0]  # numbers that fill whole words
        offsets = not settings.symmetric and not has_room(settings.bits, settings.group)
        self.form = kept(settings.bits, settings.group, self.wide, offsets)

    def groups(self, layer: Any) -> int:
        """Return how many groups there are along the inputs."""
        return -(-layer.in_features // self.group) if self.group else 1

    def units(self, layer: Any) -> tuple[int, int] | None:
        """Return the units in which outputs and inputs can be cut, or None where inputs are out of order.

        The group of an input that is out of order counts all groups of the whole layer.
        """
        return None if self.ordered else (self.per, math.lcm(self.per, self.group or 1))

    def allocate(self, layer: Any) -> None:
        check_words((layer.in_features, *outputs(layer)), self.per)
        self.given = layer.weight.dtype
        made = self.parameters(layer)
        extra = () if self.ordered else ("g_idx",)
        if layer.bias is None:  # old files have biases of zero
            extra = (*extra, "bias")
        layer.ignored_tensors = (*layer.ignored_tensors, *extra)
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    @abstractmethod
    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the checkpoint fills."""

    def along_outputs(self, layer: Any, rows: int) -> torch.nn.Parameter:
        """Make a parameter for words [rows, ...] that hold the numbers of each output."""
        return checkpoint_parameter(layer, (rows, -1), torch.int32, count=lambda n: n * self.bits // 32)

    def integers(
        self, numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor | None = None
    ) -> Integers:
        """Return the weights with unsigned numbers [n, k], zero points and scales [n, groups]."""
        if self.bits == 8:
            numbers, zeros = (numbers.to(torch.int16) - 128).to(torch.int8), zeros.to(torch.int16) - 128
        return Integers(numbers, scales.contiguous(), zeros.contiguous(), self.bits, self.group, index=index)

    def ordered_integers(
        self, layer: Any, numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, orders: torch.Tensor | None
    ) -> Integers | Wide:
        """Return the weights as `integers` does, where `orders` [projections, k] give the group of each input.

        None or zeros mean that inputs of a group are neighbours.
        """
        if orders is None or not bool(orders.any()):
            return self.integers(numbers, zeros, scales)
        if bool((orders == orders[:1]).all()):
            return self.integers(numbers, zeros, scales, orders[0])
        split = (torch.split(each, list(outputs(layer))) for each in (numbers, zeros, scales))
        parts = [self.integers(*part) for part in zip(*split, orders, strict=True)]
        return Wide(torch.cat([part.widened(self.given) for part in parts]), _APART)

    def order(self, layer: Any) -> torch.nn.Parameter:
        """Make a parameter for the `orders` of `ordered_integers`."""
        return checkpoint_parameter(layer, (-1, layer.in_features), torch.int32, count=lambda _: 1, broadcast=True)
