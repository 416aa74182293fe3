"""Formats of compressed-tensors that float weights become, and the `quantization_config` that describes them.

Format: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrule_quant.row_chunks import in_chunks

_CANDIDATES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of a group's largest number that 4 bits reach


class Target(ABC):
    """One format. Weights are [outputs, inputs]; the tensors of a layer are named by suffixes of its name."""

    form: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None

    @abstractmethod
    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Also for the meta device, which tells types and shapes."""

    @abstractmethod
    def restored(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weights that `quantized` stands for, in float32."""

    def problem(self, outputs: int, inputs: int) -> str | None:
        """Return why a layer of this size cannot be quantized; None when it can."""
        return None

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": self.activations}
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }


def _arguments(bits: int, kind: str, strategy: str, dynamic: bool, group: int | None = None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": dynamic,
    }


class PerChannel(Target):
    """8 bits with a scale for each output channel; activations are quantized as they come, for each token."""

    def __init__(self, kind: str, form: str, dtype: torch.dtype, largest: float) -> None:
        self.form, self.dtype, self.largest = form, dtype, largest
        self.weights = _arguments(8, kind, "channel", dynamic=False)
        self.activations = _arguments(8, kind, "token", dynamic=True)

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values = weight.float()
        scale = _scale(values.abs().amax(1, keepdim=True) / self.largest, weight.dtype)
        numbers = values / scale.float()
        numbers = numbers if self.dtype.is_floating_point else numbers.round()
        return {"weight": numbers.clamp(-self.largest, self.largest).to(self.dtype), "weight_scale": scale}

    def restored(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"].float()


class Packed4(Target):
    """4 bits with a scale for each group of inputs, eight numbers in a word of 32 bits, from its lowest bits on."""

    form = "pack-quantized"

    def __init__(self, group: int) -> None:
        self.group = group
        self.weights = _arguments(4, "int", "group", dynamic=False, group=group)

    def problem(self, outputs: int, inputs: int) -> str | None:
        if inputs % self.group or inputs % 8:
            return f"{inputs} inputs are not a whole number of groups of {self.group}"
        return None

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        n, k = weight.shape
        values = weight.float().view(n, k // self.group, self.group)
        scale = _best_scale(values, weight.dtype)
        numbers = _four_bits(values, scale).view(n, k // 8, 8).to(torch.int32) + 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
        words = (numbers << shifts).sum(-1, dtype=torch.int32)  # bits that do not overlap; the sign bit is the last's
        return {
            "weight_packed": words,
            "weight_scale": scale.squeeze(-1),
            "weight_shape": torch.tensor([n, k], dtype=torch.int64),
        }

    def restored(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        words, scale = tensors["weight_packed"], tensors["weight_scale"].float()
        numbers = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        values = (numbers - 8).view(*scale.shape, self.group) * scale.unsqueeze(-1)
        return values.view(words.shape[0], -1)


def _scale(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a scale to the type of the weights; none becomes zero, even where all weights are."""
    rounded = exact.to(dtype)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def _four_bits(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale.float()).round().clamp(-8, 7)


def _best_scale(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales [rows, groups, 1] of values [rows, groups, group], the meta device included."""
    rows, groups, width = values.shape
    if values.is_meta:  # whose operations take longer than those on numbers
        return values.new_empty((rows, groups, 1), dtype=dtype)
    return _scale(in_chunks(_searched, values.view(-1, width)), dtype).view(rows, groups, 1)


def _searched(values: torch.Tensor) -> torch.Tensor:
    """Return the scale of each group with the least squared error; cutting off outliers is often better.

    Each candidate gives numbers, and the scale that suits these best is taken.
    """
    largest = values.abs().amax(-1, keepdim=True)
    best, most = largest / 7.5, torch.zeros_like(largest)
    for share in _CANDIDATES:
        numbers = (values * (7.5 / share / largest)).nan_to_num_(0.0).round_().clamp_(-8, 7)
        both, own = (numbers * values).sum(-1, keepdim=True), numbers.square().sum(-1, keepdim=True)
        scale = both / own
        gain = scale * both  # how much less the squared error is than that of zeros
        better = gain > most  # not where all numbers are zero
        best, most = torch.where(better, scale, best), torch.where(better, gain, most)
    return best


def target_of(name: str, group_size: int) -> Target:
    if name == "int4":
        return Packed4(group_size)
    if name == "fp8":
        dtype = torch.float8_e4m3fn
        return PerChannel("float", "float-quantized", dtype, torch.finfo(dtype).max)
    return PerChannel("int", "int-quantized", torch.int8, 127)
