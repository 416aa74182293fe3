"""The format `compressed-tensors`: groups of layers, each with a scheme for its weights and one for its activations.

What is read, by `type` and `num_bits` of the weights:

    int 2-8    numbers int8 [n, k], a scale for each output channel, matrix or group, and zero points or not;
               activations int8, or as they are
    float 8    e4m3, a scale for each output channel, matrix, group or block; activations fp8, or as they are;
               ``mxfp8-quantized``: a power of two for 32 inputs
    int 1-8    ``pack-quantized``: words of 32 bits along the inputs, scales and zeros for groups or channels; with
               "actorder" ``group`` a tensor says which group each input belongs to
    float 4    ``nvfp4-pack-quantized``: e2m1 with an e4m3 scale for 16 inputs and one for the matrix, by which these
               were multiplied; ``mxfp4-pack-quantized``: a power of two for 32 inputs. Activations as they are
    float 6    ``mxfp6-pack-quantized``: e2m3, four in three bytes, with a power of two for 32 inputs

Weights of 8 bits, and floats, may be sparse: see `ferrule_plugins.quantization.sparse`.
Activations are quantized as they come, one scale for each row; scales that were measured before (`dynamic` false) are
coarser, and not used. https://github.com/vllm-project/compressed-tensors describes the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization.sparse import Sparse, SparseFloats, Sparsity
from ferrule_quant.float4 import Float4Scheme
from ferrule_quant.fp8 import MX, Fp8Scheme, block_of
from ferrule_quant.groupwise import Grouped, Settings
from ferrule_quant.integers import UNUSED, Int8Scheme
from ferrule_quant.method import CheckedMethod, check_cache_scheme
from ferrule_quant.names import chosen, listed, targeted
from ferrule_quant.packed_words import check_words, outputs, per_words, unpacked
from ferrule_quant.products import Integers, Quantized, Shared, Wide
from ferrule_quant.scales import check_groups, scale_parameter

# Of float weights of 4 bits: the strategy, and how many inputs have a scale.
_FLOATS = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}
_PLAIN = ("naive-quantized", "int-quantized", "float-quantized")  # numbers of 8 bits with scales beside them
_READ = (*_PLAIN, *_FLOATS, "pack-quantized", "mxfp8-quantized", "mxfp6-pack-quantized")
_WHY_NOT = {
    "dense": ": groups of it have floats, of which nothing says what they are rounded to",
    "marlin-24": ", an order that was chosen for one GPU's kernels, and that no version writes any more",
    "sparse-bitmask": ": sparse weights are described by 'sparsity_config'",
    "sparse-24-bitmask": ": sparse weights are described by 'sparsity_config'",
    "mixed-precision": ": it is for groups with formats of their own, and this one has none",
}
_LARGEST = 1 << 20  # inputs of a group
# Values of "actorder": whether inputs of a group may be anywhere.
_ORDERED = {None: False, False: False, "weight": False, "static": False, True: True, "group": True, "dynamic": True}


@dataclass(frozen=True)
class Group:
    """An entry of `config_groups`. `kind` is int8, fp8, packed, nvfp4, mxfp4 or mxfp6.

    `wide` activations are not quantized.
    """

    targets: Sequence[str]
    kind: str
    strategy: str
    wide: bool
    settings: Settings | None = None  # of packed integers
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale of fp8
    size: int = 0  # inputs that share a scale of int8; 0: all
    symmetric: bool = True  # without zero points, of int8


def read(config: Mapping[str, Any]) -> list[Group]:
    """Read the groups of a configuration. Raises ValueError with what is not supported."""
    if config.get("transform_config"):
        raise ValueError("does not read 'transform_config'")
    check_cache_scheme(config.get("kv_cache_scheme"))
    sparse, groups = Sparsity(config.get("sparsity_config")).any, config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups and not sparse:
        raise ValueError("finds no 'config_groups'")
    found = [_group(name, values, str(config.get("format"))) for name, values in groups.items()]
    if sparse and any(group.kind not in ("int8", "fp8") for group in found):
        raise ValueError("reads sparse weights of 8 bits, or floats")
    return found


def _group(name: str, values: Any, form: str) -> Group:
    weights = values.get("weights") if isinstance(values, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"finds no 'weights' in {name}")
    form, bits, strategy = str(values.get("format") or form), weights.get("num_bits"), str(weights.get("strategy"))
    activations, symmetric = values.get("input_activations"), weights.get("symmetric", True)
    if not isinstance(symmetric, bool) or not isinstance(activations, Mapping | None):
        raise ValueError(f"finds in {name} a 'symmetric' or 'input_activations' of another type")
    said = f"{name} has weights of {bits} bits, type {weights.get('type')!r}, strategy {strategy!r}, format {form!r}"
    kind = _kind(name, weights, form, said)
    fewest = {"nvfp4": (4, 8), "mxfp4": (4, 6, 8), "mxfp6": (6, 8)}.get(kind, (8,))
    if isinstance(activations, Mapping) and activations.get("num_bits") not in fewest:
        raise ValueError(f"does not quantize activations to {activations.get('num_bits')} bits, as {name} asks")
    settings = None
    if kind == "packed":
        size = weights.get("group_size") if strategy == "group" else None
        ordered = _ORDERED[weights.get("actorder")]
        settings = Settings.of({"bits": bits, "group_size": size, "desc_act": ordered, "sym": symmetric})
    block = None
    if kind == "fp8":
        block = block_of(weights, "block_structure") if strategy == "block" else _rows(weights)
    size = int(weights["group_size"]) if kind == "int8" and strategy == "group" else 0
    return Group(listed(values, "targets"), kind, strategy, not activations, settings, block, size, symmetric)


def _rows(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block of a group of inputs; None without groups."""
    return (1, weights["group_size"]) if weights.get("strategy") == "group" else None


def _kind(name: str, weights: Mapping[str, Any], form: str, said: str) -> str:
    """Return the `kind` of a `Group`. Raises ValueError with what is not supported."""
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), str(weights.get("strategy"))
    symmetric, size = weights.get("symmetric", True), weights.get("group_size")
    if kind == "int" and form == "pack-quantized" and strategy in ("group", "channel"):
        order = weights.get("actorder")
        if not isinstance(order, str | bool | None) or order not in _ORDERED:
            raise ValueError(f"does not know the actorder of {name}, {order!r}")
        return "packed"
    if form not in _READ:
        raise ValueError(f"does not read the format {form!r:.80}{_WHY_NOT.get(form, '')}")
    grouped = strategy == "group" and type(size) is int and 0 < size <= _LARGEST
    few = type(bits) is int and 2 <= bits <= 8
    if kind == "int" and few and form in _PLAIN and (strategy in ("tensor", "channel") or grouped):
        return "int8"
    if kind == "float" and bits == 8 and form == "mxfp8-quantized":
        if not grouped or size != MX[1]:
            raise ValueError(f"reads groups of {MX[1]} in this form: {said}, {size}")
        return "fp8"
    if kind == "float" and bits == 8 and form in _PLAIN and (strategy in ("tensor", "channel", "block") or grouped):
        if strategy == "block" and block_of(weights, "block_structure") is None:
            raise ValueError(f"finds no 'block_structure' in {name}")
        return "fp8"
    if kind == "float" and bits == 6 and symmetric and form == "mxfp6-pack-quantized":
        if not grouped or size != MX[1]:
            raise ValueError(f"reads groups of {MX[1]} in this form: {said}, {size}")
        return "mxfp6"
    if kind == "float" and bits == 4 and symmetric and form in _FLOATS:
        if (strategy, size) != _FLOATS[form]:
            raise ValueError(f"reads groups of {_FLOATS[form][1]} in this form: {said}, {size}")
        return form[:5]
    raise ValueError(f"does not read what {said}")


class CompressedTensors(CheckedMethod):
    formats = ("compressed-tensors",)
    settings_elsewhere = {"compression_config": "compressed-tensors"}  # its first name
    left_keys = ("ignore",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._groups = read(config)
        self._sparsity = Sparsity(config.get("sparsity_config"))

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        read(config)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        dtype = torch.float32 if layer.head else None
        named = (group for group in self._groups if targeted(layer, group.targets))
        group = None if chosen(layer, self.left) else next(named, None)
        made = None if group is None else self._made(group, dtype)
        return Sparse(made or SparseFloats(self.shared, dtype)) if self._sparsity.means(layer) else made

    def _made(self, group: Group, dtype: torch.dtype | None) -> Quantized:
        if group.kind == "fp8":
            return Fp8Scheme(self.shared, dtype, wide=group.wide, block=group.block)
        if group.kind == "mxfp6":
            return Float6Scheme(self.shared, dtype, wide=group.wide)
        if group.kind in ("nvfp4", "mxfp4"):
            return Float4Scheme(self.shared, dtype, group.kind)
        if group.settings is not None:
            return PackedIntScheme(self.shared, dtype, group.settings, group.wide)
        return Int8Scheme(self.shared, dtype, group.wide, group.size, group.symmetric)


class PackedIntScheme(Grouped):
    """A scheme with parameters `weight_packed` and `weight_scale`.

    There is also `weight_zero_point` where groups are not symmetric, and `weight_g_idx` where they are out of order.
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None, settings: Settings, wide: bool) -> None:
        super().__init__(shared, dtype, settings, wide)
        self.symmetric = settings.symmetric
        self.block, self.per = self.per, 1  # the last words of a row need not be full

    def units(self, layer: Any) -> tuple[int, int] | None:
        return None if self.ordered else (self.block, math.lcm(self.block, self.group or 1))

    def allocate(self, layer: Any) -> None:
        check_groups(layer.in_features, self.group or 1)
        ignored = layer.ignored_tensors
        super().allocate(layer)
        unused = [name for name in ("weight_zero_point", "weight_g_idx") if not hasattr(layer, name)]
        layer.ignored_tensors = (*ignored, *UNUSED, *unused)

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        groups = self.groups(layer)
        made: dict[str, torch.nn.Parameter] = {
            "weight_packed": checkpoint_parameter(layer, (-1, self._words(layer.in_features)), torch.int32),
            "weight_scale": checkpoint_parameter(layer, (-1, groups), torch.float32),
        }
        if not self.symmetric:
            check_words(outputs(layer)[:-1], self.block)
            made["weight_zero_point"] = checkpoint_parameter(layer, (-1, groups), torch.int32, count=self._words)
        if self.ordered:
            made["weight_g_idx"] = self.order(layer)
        return made

    def _words(self, count: int) -> int:
        """Return how many words hold `count` numbers."""
        return -(-count * self.bits // 32)

    def weights(self, layer: Any) -> Integers | Wide:
        scales = layer.weight_scale.detach()
        numbers = self._numbers(layer.weight_packed.detach())[:, : layer.in_features]
        if self.symmetric:
            zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8, device=scales.device)
        else:  # words along the outputs
            zeros = self._numbers(layer.weight_zero_point.detach().t()).t()[: layer.out_features]
        orders = layer.weight_g_idx.detach() if self.ordered else None
        return self.ordered_integers(layer, numbers, zeros, scales, orders)

    def _numbers(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack numbers [rows, …], including those that fill up the last words."""
        missing = -words.shape[1] % per_words(self.bits)[1]
        return unpacked(torch.nn.functional.pad(words, (0, missing)) if missing else words, self.bits)


class Float6Scheme(Quantized):
    """A scheme with parameters `weight_packed` uint8, four numbers e2m3 in three bytes, and `weight_scale`.

    Scales are exponents for 32 inputs. An e2m3 is an integer from -60 to 60, divided by 8.
    """

    def allocate(self, layer: Any) -> None:
        self.given, k = layer.weight.dtype, layer.in_features
        check_groups(k, MX[1])
        packed = checkpoint_parameter(layer, (-1, k // 4 * 3), torch.uint8)
        layer.weight_scale = scale_parameter(layer, k // MX[1])
        layer.weight, layer.weight_packed = None, packed
        layer.ignored_tensors = (*layer.ignored_tensors, *UNUSED)

    def weights(self, layer: Any) -> Integers:
        first, second, third = layer.weight_packed.detach().unflatten(1, (-1, 3)).unbind(2)
        parts = first, first >> 6 | second << 2, second >> 4 | third << 4, third >> 2
        codes = torch.stack(parts, dim=2).flatten(1) & 63
        mantissa, exponent = codes & 7, codes >> 3 & 3
        whole = torch.where(exponent == 0, mantissa, (8 + mantissa) << (exponent.clamp(min=1) - 1)).to(torch.int8)
        numbers = torch.where(codes >= 32, -whole, whole)
        return Integers(numbers, layer.weight_scale.detach() / 8, None, 8, MX[1])
