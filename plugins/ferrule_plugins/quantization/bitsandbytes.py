"""bitsandbytes: nf4 and fp4 (https://arxiv.org/abs/2305.14314) and int8 (https://arxiv.org/abs/2208.07339).

Checkpoints have, of 4 bits, a `weight` of bytes [n * k / 2, 1], of a pair the first in the high half; `weight.absmax`,
the scale of each 64 weights in their order in memory; and `weight.quant_state.bitsandbytes__nf4`, JSON in bytes. With
double quantization scales are bytes: places in `weight.nested_quant_map`, times `weight.nested_absmax` for each 256,
plus an offset from the JSON. Of 8 bits they have `SCB`, the largest of each row
(https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py, `QuantState`).

Float weights are made nf4 as they load. Activations are not quantized in any of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_kernels.cpu import blocks
from ferrule_kernels.cpu.codes import encode
from ferrule_nn import checkpoint_parameter
from ferrule_quant.code_tables import Coded, CodedScheme, halves
from ferrule_quant.decoded_parameters import decoded_parameter
from ferrule_quant.method import CheckedMethod
from ferrule_quant.names import chosen
from ferrule_quant.packed_words import outputs
from ferrule_quant.products import Integers, Quantized, Shared

BLOCK = 64
_NESTED = 256  # scales that share one
_LONGEST_STATE = 1 << 12  # bytes of the JSON
_ROWS = 64  # that are quantized at a time
_LEAST = 8  # inputs of a group of the CPU's kernel
# Quantiles of a normal distribution, from the appendix of the paper on QLoRA.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = (*(value / 12 for value in _TWELFTHS), *(-value / 12 for value in _TWELFTHS))
TABLES = {"nf4": NF4, "fp4": FP4}


class BitsAndBytes(CheckedMethod):
    conformance = "ferrule_testkit.samples.quantization:BITSANDBYTES"
    formats = ("bitsandbytes",)
    left_keys = ("llm_int8_skip_modules",)
    from_floats = True

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        if config and not config.get("load_in_8bit"):
            kind = str(config.get("bnb_4bit_quant_type", "fp4"))
            if not config.get("load_in_4bit"):
                raise ValueError("finds neither 'load_in_4bit' nor 'load_in_8bit' to be true")
            if kind not in TABLES:
                raise ValueError(f"reads {' and '.join(TABLES)}, and bnb_4bit_quant_type is {kind!r}")

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if chosen(layer, self.left) or layer.head and not self.left:
            return None  # heads stay as they are, where the configuration does not say what does
        dtype = torch.float32 if layer.head else None
        if self.config.get("load_in_8bit"):
            return RowsScheme(self.shared, dtype, wide=True)
        if self.config:
            nested = bool(self.config.get("bnb_4bit_use_double_quant"))
            return BlocksScheme(self.shared, dtype, str(self.config.get("bnb_4bit_quant_type", "fp4")), nested)
        return None if layer.in_features % _LEAST else Nf4FromFloats(self.shared, dtype)


class Nf4FromFloats(CodedScheme):
    """A scheme for float weights that are quantized once loaded."""

    def read_codes(self, layer: Any) -> Coded:
        return coded_of(layer.weight.detach())


def coded_of(weight: torch.Tensor) -> Coded:
    """Return the nearest nf4 codes of weights [n, k], for groups of 64 inputs, or as many as divide k evenly."""
    group = math.gcd(weight.shape[1], BLOCK)
    codes, scales = (encode if blocks.takes(weight) else encode_by_torch)(weight, torch.tensor(NF4), group)
    return Coded(codes, NF4, scales, group)


def encode_by_torch(weight: torch.Tensor, table: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a weight as `ferrule_kernels.cpu.codes.encode` does, on any device."""
    n, k = weight.shape
    scales = weight.reshape(n, -1, group).abs().amax(2).float()
    between = (table[1:] + table[:-1]) / 2
    codes = torch.zeros((n, k), dtype=torch.uint8, device=weight.device)
    for first in range(0, n, _ROWS):  # no second matrix of float32
        rows = slice(first, first + _ROWS)
        parts = weight[rows].float().view(-1, k // group, group) / scales[rows].clamp(min=1e-30).unsqueeze(-1)
        for border in between.tolist():  # many times as fast as `torch.bucketize`
            codes[rows] += (parts > border).flatten(1)
    return codes, scales


class BlocksScheme(CodedScheme):
    """A scheme for nf4 or fp4 of a checkpoint.

    Blocks reach into the next output where inputs are not a multiple of 64: groups then have as many inputs as lie in
    one block.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None, kind: str, nested: bool) -> None:
        super().__init__(shared, dtype)
        self.kind = kind
        self.nested = nested

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        if k % _LEAST:
            raise CheckpointError(f"{k} inputs of a layer are not a multiple of {_LEAST}.")
        self.group = group = math.gcd(k, BLOCK)
        made = {
            "weight": decoded_parameter(layer, (-1, k // 2), torch.uint8, _bytes),
            "weight_absmax": decoded_parameter(
                layer, (-1, k // group), torch.uint8 if self.nested else torch.float32, self._of_blocks
            ),
            "weight_quant_state": decoded_parameter(layer, (-1, 1), torch.float32, self._offset),
        }
        if self.nested:
            made["weight_nested_absmax"] = decoded_parameter(layer, (-1, k // group), torch.float32, self._of_nested)
            made["weight_nested_quant_map"] = decoded_parameter(
                layer, (-1, 256), torch.float32, lambda given, size: given.expand(size), count=lambda rows: 1
            )
        layer.ignored_tensors = (*layer.ignored_tensors, "weight_quant_map")  # `TABLES` has it
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    def _of_blocks(self, given: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """Return a scale for each group of each output, given one for each block."""
        if given.is_floating_point() == self.nested or given.numel() != -(-size.numel() * self.group // BLOCK):
            raise ValueError("another number of scales, or of another type")
        return given.flatten().repeat_interleave(BLOCK // self.group)[: size.numel()].reshape(size)

    def _of_nested(self, given: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """Return a nested scale for each group of each output, given one for each 256 blocks."""
        blocks = -(-size.numel() * self.group // BLOCK)
        if given.numel() != -(-blocks // _NESTED):
            raise ValueError("another number of nested scales")
        each = given.flatten().repeat_interleave(_NESTED)[:blocks]
        return each.repeat_interleave(BLOCK // self.group)[: size.numel()].reshape(size)

    def _offset(self, given: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """Return the offset of nested scales that the JSON states, for each output.

        Raises ValueError where it states another format.
        """
        if given.dtype != torch.uint8 or given.numel() > _LONGEST_STATE:
            raise ValueError("no text of a usual length")
        stated = json.loads(bytes(given.flatten().tolist()))
        expected = {
            "quant_type": self.kind,
            "blocksize": BLOCK,
            **({"nested_blocksize": _NESTED} if self.nested else {}),
        }
        for key, value in expected.items():
            if not isinstance(stated, dict) or stated.get(key) != value:
                raise ValueError(f"{key} is not {value}")
        offset = stated.get("nested_offset", 0.0) if self.nested else 0.0
        if not isinstance(offset, float):
            raise ValueError("nested_offset is not a number")
        return torch.full(size, offset)

    def read_codes(self, layer: Any) -> Coded:
        scales = layer.weight_absmax.detach()
        if self.nested:
            maps, rows = layer.weight_nested_quant_map.detach(), outputs(layer)
            pairs = zip(scales.split(rows), maps, strict=True)
            looked_up = torch.cat([each[places.int()] for places, each in pairs])
            scales = looked_up * layer.weight_nested_absmax.detach() + layer.weight_quant_state.detach()
        codes = halves(layer.weight.detach(), first_is_low=False)
        return Coded(codes, TABLES[self.kind], scales, self.group)


def _bytes(given: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Return a tensor's bytes, which a file may have under the name of another type."""
    return given.contiguous().flatten().view(torch.uint8).reshape(size)


class RowsScheme(Quantized):
    """A scheme for int8 of a checkpoint: parameters `weight` [n, k] and `SCB` [n], the float that 127 stands for."""

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype
        weight = checkpoint_parameter(layer, (-1, layer.in_features), torch.int8)
        layer.SCB = checkpoint_parameter(layer, (-1,), torch.float32)
        layer.weight = weight
        layer.ignored_tensors = (*layer.ignored_tensors, "weight_format")

    def weights(self, layer: Any) -> Integers:
        return Integers(layer.weight.detach(), layer.SCB.detach()[:, None] / 127, None, 8)
