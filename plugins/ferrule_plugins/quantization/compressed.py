"""The format `compressed-tensors`: groups of layers, each with a scheme for its weights and one for its activations.

What is read, by `type` and `num_bits` of the weights:

    int 8      numbers int8 [n, k], a scale for each output channel or matrix; activations int8, or as they are
    float 8    e4m3, a scale for each output channel, matrix, or block of 128 x 128; activations fp8, or as they are
    int 4      ``pack-quantized`` (as may be int 8): words of 32 bits along the inputs, scales and zeros for groups
    float 4    ``nvfp4-pack-quantized``: e2m1 with an e4m3 scale for 16 inputs and one for the matrix, by which these
               were multiplied; ``mxfp4-pack-quantized``: a power of two for 32 inputs. Activations as they are

Activations are quantized as they come, one scale for each row; scales that were measured before (`dynamic` false) are
coarser, and not used. https://github.com/vllm-project/compressed-tensors describes the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization.coded import E2M1, Coded, CodedScheme, halves, powers_of_two
from ferrule_plugins.quantization.fp8 import BLOCK, Fp8Scheme
from ferrule_plugins.quantization.groupwise import group_problem
from ferrule_plugins.quantization.method import CheckedMethod
from ferrule_plugins.quantization.names import chosen, listed
from ferrule_plugins.quantization.products import Integers, Quantized, Shared, checked
from ferrule_plugins.quantization.words import check_words, outputs, unpacked

_ALL = "Linear"  # as a target: the class that all such layers have
# Of float weights of 4 bits: the strategy, and how many inputs have a scale.
_FLOATS = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}
_IN_ORDER = (None, False, "weight", "static")  # of "actorder": inputs stand where they stood


@dataclass(frozen=True)
class Group:
    """One of `config_groups`, read. `kind` is int8, fp8, packed, nvfp4 or mxfp4.

    `wide` activations are not quantized.
    """

    targets: Sequence[str]
    kind: str
    strategy: str
    bits: int
    wide: bool
    group: int = 0
    symmetric: bool = True


def read(config: Mapping[str, Any]) -> list[Group]:
    """The groups of a configuration. Raises ValueError with what is not read here."""
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise ValueError(f"does not read {key!r}")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ValueError("does not read sparse weights")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("finds no 'config_groups'")
    return [_group(name, values, str(config.get("format"))) for name, values in groups.items()]


def _group(name: str, values: Any, form: str) -> Group:
    weights = values.get("weights") if isinstance(values, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"finds no 'weights' in {name}")
    form, bits, strategy = str(values.get("format") or form), weights.get("num_bits"), str(weights.get("strategy"))
    activations, symmetric = values.get("input_activations"), weights.get("symmetric", True)
    if not isinstance(symmetric, bool) or not isinstance(activations, Mapping | None):
        raise ValueError(f"finds in {name} a 'symmetric' or 'input_activations' of another type")
    said = f"{name} has weights of {bits} bits, type {weights.get('type')!r}, strategy {strategy!r}, format {form!r}"
    if form == "pack-quantized" and weights.get("type") == "int" and strategy in ("group", "channel"):
        kind, problem = "packed", group_problem(weights.get("group_size"))
        if bits not in (4, 8) or bits == 8 and (strategy == "group" or not symmetric):
            problem = f"takes 4 bits, or 8 with a scale for each channel: {said}"
        if weights.get("actorder") not in _IN_ORDER:
            problem = f"does not read inputs out of order: actorder of {name} is {weights['actorder']!r}"
    elif weights.get("type") == "int" and bits == 8 and symmetric and strategy in ("tensor", "channel"):
        kind, problem = "int8", None
    elif weights.get("type") == "float" and bits == 8 and strategy in ("tensor", "channel", "block"):
        block = weights.get("block_structure")
        odd = strategy == "block" and block != [BLOCK, BLOCK]
        kind, problem = "fp8", f"reads blocks of {BLOCK} x {BLOCK}, and those of {name} are {block}" if odd else None
    elif weights.get("type") == "float" and bits == 4 and form in _FLOATS and symmetric:
        asked = strategy, weights.get("group_size")
        odd = asked != _FLOATS[form]
        kind, problem = (
            form[:5],
            f"reads groups of {_FLOATS[form][1]} in this form: {said}, {asked[1]}" if odd else None,
        )
    else:
        kind, problem = "", f"does not read what {said}"
    fewest = (4, 8) if kind in ("nvfp4", "mxfp4") else (8,)
    if isinstance(activations, Mapping) and activations.get("num_bits") not in fewest and problem is None:
        problem = f"does not quantize activations to {activations.get('num_bits')} bits, as {name} asks"
    if problem is not None:
        raise ValueError(problem)
    group = int(weights.get("group_size") or 0) if strategy == "group" else 0
    targets = listed(values, "targets")
    return Group(targets, kind, strategy, int(bits or 0), not activations, max(group, 0), symmetric)


class CompressedTensors(CheckedMethod):
    formats = ("compressed-tensors",)
    left_keys = ("ignore",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._groups = read(config)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        read(config)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        if chosen(layer, self.left):
            return None
        for group in self._groups:
            if _ALL in group.targets or chosen(layer, group.targets):
                return self._made(group, torch.float32 if layer.head else None)
        return None

    def _made(self, group: Group, dtype: torch.dtype | None) -> LinearScheme:
        if group.kind == "fp8":
            tall = BLOCK if group.strategy == "block" else 0
            return Fp8Scheme(self.shared, dtype, wide=group.wide, tall=tall)
        if group.kind in ("nvfp4", "mxfp4"):
            return Float4Scheme(self.shared, dtype, group.kind)
        return (Int8Scheme if group.kind == "int8" else PackedIntScheme)(self.shared, dtype, group)


class Int8Scheme(Quantized):
    """Parameters `weight` int8 and `weight_scale`."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, group: Group) -> None:
        super().__init__(shared, dtype, group.wide)
        self.group = group

    def allocate(self, layer: Any) -> None:
        self.given = layer.weight.dtype
        extra = ("input_scale", "input_zero_point", "weight_zero_point", "weight_shape", "weight_g_idx")
        needed = () if self.group.symmetric else ("weight_zero_point",)
        layer.ignored_tensors = (*layer.ignored_tensors, *(name for name in extra if name not in needed))
        for name, parameter in self.parameters(layer).items():
            setattr(layer, name, parameter)

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter | None]:
        """Those that the checkpoint fills, and None for those that it does not have."""
        return {
            "weight_scale": checkpoint_parameter(layer, (-1, 1), torch.float32, broadcast=True),
            "weight": checkpoint_parameter(layer, (-1, layer.in_features), torch.int8),
        }

    def weights(self, layer: Any) -> Integers:
        return Integers(layer.weight.detach(), layer.weight_scale.detach(), None, 8)


class PackedIntScheme(Int8Scheme):
    """Parameters `weight_packed`, `weight_scale`, and `weight_zero_point` where groups are not symmetric."""

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter | None]:
        k, size, per = layer.in_features, self.group.group, 32 // self.group.bits
        if size and k % size:
            raise CheckpointError(f"{k} inputs of a layer are not a whole number of groups of {size}.")
        groups = k // size if size else 1
        made: dict[str, torch.nn.Parameter | None] = {
            "weight_packed": checkpoint_parameter(layer, (-1, -(-k // per)), torch.int32),
            "weight_scale": checkpoint_parameter(layer, (-1, groups), torch.float32),
        }
        if not self.group.symmetric:
            check_words(outputs(layer)[:-1], per)
            made["weight_zero_point"] = checkpoint_parameter(
                layer, (-1, groups), torch.int32, count=lambda rows: -(-rows // per)
            )
        return {**made, "weight": None}

    def weights(self, layer: Any) -> Integers:
        bits = self.group.bits
        numbers = unpacked(layer.weight_packed.detach(), bits, tuple(range(32 // bits)))[:, : layer.in_features]
        scales = layer.weight_scale.detach()
        if bits == 8:
            return Integers((numbers.to(torch.int16) - 128).to(torch.int8), scales, None, 8)
        zeros = None
        if not self.group.symmetric:  # words along the outputs
            words = layer.weight_zero_point.detach()
            zeros = unpacked(words.t()).t()[: layer.out_features].contiguous()
        return Integers(numbers, scales, zeros, 4, self.group.group)


class Float4Scheme(CodedScheme):
    """Parameters `weight_packed` uint8, of a pair the first in the low half; `weight_scale`, `weight_global_scale`."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, kind: str) -> None:
        super().__init__(shared, dtype)
        self.kind = kind
        self.group = 16 if kind == "nvfp4" else 32

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        if k % self.group:
            raise CheckpointError(f"{k} inputs of a layer are not a whole number of groups of {self.group}.")
        kept = torch.float8_e4m3fn if self.kind == "nvfp4" else torch.uint8
        packed = checkpoint_parameter(layer, (-1, k // 2), torch.uint8)
        scale = checkpoint_parameter(layer, (-1, k // self.group), kept)
        layer.ignored_tensors = (*layer.ignored_tensors, "input_global_scale", "input_scale", "weight_shape")
        if self.kind == "nvfp4":
            layer.weight_global_scale = checkpoint_parameter(layer, (-1, 1), torch.float32, broadcast=True)
        layer.weight, layer.weight_packed, layer.weight_scale = None, packed, scale

    def coded(self, layer: Any) -> Coded:
        scales = layer.weight_scale.detach()
        if self.kind == "nvfp4":
            scales = checked(scales).float() / layer.weight_global_scale.detach()
        else:
            scales = powers_of_two(scales)
        return Coded(halves(layer.weight_packed.detach()), E2M1, scales, self.group)
