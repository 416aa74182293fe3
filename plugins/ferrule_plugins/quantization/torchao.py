"""torchao: its tensors in safetensors files, as transformers writes them with a `TorchAoConfig` (torchao 0.18).

A weight is several tensors, called ``_weight_qdata``, ``_weight_scale`` and ``_weight_zero_point``:

    Int8Tensor                 int8 [n, k]; scales [n, 1] or of groups
    Float8Tensor               e4m3 [n, k]; scales [n, 1], one, or of blocks of 128 x 128
    IntxUnpackedToInt8Tensor   numbers of 1 to 8 bits as int8 [n, k]; scales and zero points [n, groups]
    Int4Tensor …               numbers of 4 bits in several orders, see `ferrule_plugins.quantization.torchao_int4`

An embedding (``include_input_output_embeddings``) has those of integers, and becomes floats when its tensors come.
``quant_type`` of the configuration says which, for all layers or, as a ``FqnToConfig``, by their names. Files of older
versions are pickles of Python objects, which are not read. https://github.com/pytorch/ao describes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_nn import checkpoint_parameter
from ferrule_plugins.quantization import embeddings
from ferrule_plugins.quantization.torchao_int4 import (
    NUMBERS,
    SCALES,
    ZEROS,
    Int4Scheme,
    PairsScheme,
    TilesScheme,
    WordsScheme,
)
from ferrule_quant.fp8 import BLOCK, BLOCKS, Fp8Scheme
from ferrule_quant.groupwise import Settings
from ferrule_quant.method import CheckedMethod
from ferrule_quant.mixed_projections import side_by_side
from ferrule_quant.names import means, names_of
from ferrule_quant.products import Integers, Quantized, Shared, has_room, kept

_DEFAULT = "_default"
_EMBEDDINGS = "include_input_output_embeddings"
_FP8 = {"Float8WeightOnlyConfig": True, "Float8DynamicActivationFloat8WeightConfig": False}
_INT8 = {"Int8WeightOnlyConfig": True, "Int8DynamicActivationInt8WeightConfig": False}
_INT4: Mapping[str, type[Int4Scheme]] = {
    "PLAIN": PairsScheme,
    "TILE_PACKED_TO_4D": TilesScheme,
    "PLAIN_INT32": WordsScheme,
}
_FP8_INT4 = "Float8DynamicActivationInt4WeightConfig"  # whose groups are of 128 inputs
_INTX = {"IntxWeightOnlyConfig": True, "Int8DynamicActivationIntxWeightConfig": False}


@dataclass(frozen=True)
class Stored:
    """The format of a layer's weights: `kind` is int8, intx, int4 or fp8; with `wide`, activations are not quantized.

    fp8 has scales for blocks where `settings` says so by its group. `packing` is the order of int4.
    """

    kind: str
    settings: Settings
    wide: bool
    packing: str = "PLAIN"


def read(stated: Any) -> Stored | None:
    """Read one configuration of torchao, None for floats. Raises ValueError with what is not supported."""
    if stated is None:
        return None
    values = stated.get("_data") if isinstance(stated, Mapping) else None
    if not isinstance(stated, Mapping) or not isinstance(values, Mapping):
        raise ValueError(f"reads configurations of torchao as objects with '_type' and '_data', not {stated!r:.80}")
    name = str(stated.get("_type"))
    if name in _FP8:
        group = _block(values.get("granularity"))
        return Stored("fp8", Settings.of({"bits": 8, "group_size": group}), _FP8[name])
    if name in _INT8:
        group = values.get("group_size") or _group(name, values.get("granularity"))
        return Stored("int8", Settings.of({"bits": 8, "group_size": group, "sym": True}), _INT8[name])
    if name in _INTX:
        if _named(values.get("intx_packing_format"), "UNPACKED_TO_INT8") != "UNPACKED_TO_INT8":
            raise ValueError(f"reads {name} unpacked to int8, not {values['intx_packing_format']!r:.80}")
        bits = re.fullmatch(r"int([1-8])", _named(values.get("weight_dtype", values.get("dtype")), "int8"))
        if bits is None:
            raise ValueError(f"does not know the numbers of {name}")
        group = _group(name, values.get("granularity", values.get("weight_granularity")))
        return Stored("intx", Settings.of({"bits": int(bits[1]), "group_size": group}), _INTX[name])
    if name in ("Int4WeightOnlyConfig", _FP8_INT4):
        return _int4(name, values)
    raise ValueError(f"does not read {name}")


def _int4(name: str, values: Mapping[str, Any]) -> Stored:
    """Return the format for 4 bits. Raises ValueError."""
    default, group = ("PRESHUFFLED", 128) if name == _FP8_INT4 else ("PLAIN", values.get("group_size", 128))
    packing = _named(values.get("int4_packing_format"), default).upper()
    if packing not in _INT4:
        raise ValueError(f"reads {name} in the forms {', '.join(_INT4)}, not {packing:.80}")
    return Stored("int4", Settings.of({"bits": 4, "group_size": group}), True, packing)


def _named(value: Any, default: str) -> str:
    """Return the name of an enumeration's value or of a type, however it was written."""
    return str(value.get("_data")) if isinstance(value, Mapping) else default if value is None else str(value)


def _group(name: str, granularity: Any) -> int | None:
    """Return how many inputs share a scale, None for all. Raises ValueError."""
    kind = str(granularity.get("_type")) if isinstance(granularity, Mapping) else "PerRow"
    if kind in ("PerRow", "PerAxis", "PerTensor"):
        return None
    if kind != "PerGroup":
        raise ValueError(f"does not read {name} with the granularity {kind}")
    data = granularity.get("_data")
    return data.get("group_size") if isinstance(data, Mapping) else 0


def _block(granularity: Any) -> int | None:
    """Return the side of an fp8 block, None for rows and matrices. Of two granularities, the weights' is the last.

    Raises ValueError.
    """
    last = granularity[-1] if isinstance(granularity, list) and granularity else granularity
    if not isinstance(last, Mapping) or last.get("_type") != "PerBlock":
        if _group("float 8 bits", last) is not None:
            raise ValueError("reads fp8 with scales for rows, matrices and blocks, not for groups")
        return None
    data = last.get("_data")
    if not isinstance(data, Mapping) or data.get("block_size") != [BLOCK, BLOCK]:
        raise ValueError(f"reads blocks of {BLOCK} x {BLOCK}, not {data!r:.80}")
    return BLOCK


class TorchAo(CheckedMethod):
    conformance = "ferrule_testkit.samples.integers:TORCHAO"
    formats = ("torchao",)
    left_keys = ("modules_to_not_convert",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._all, self._named = _schemes(config)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        _schemes(config)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        dtype = torch.float32 if layer.head else None
        found = [_fitting(self._stored(name, layer.head), layer.in_features) for name in names_of(layer)]
        return side_by_side(layer, found, lambda own: self._made(own, dtype))

    def _stored(self, name: str, head: bool) -> Stored | None:
        """Return a layer's format. Heads are not quantized unless they are named, or embeddings are quantized too."""
        if any(means(pattern, name) for pattern in self.left):
            return None
        for pattern, own in self._named.items():
            if means(pattern, name):
                return own
        return None if head and not self.config.get(_EMBEDDINGS) else self._all

    def _made(self, stored: Stored, dtype: torch.dtype | None) -> LinearScheme:
        if stored.kind == "fp8":
            block = BLOCKS if stored.settings.group else None
            return Fp8Scheme(self.shared, dtype, wide=stored.wide, block=block, numbers=NUMBERS, scales=SCALES)
        if stored.kind == "int4":
            return _INT4[stored.packing](self.shared, dtype, stored.settings.group)
        return IntxScheme(self.shared, dtype, stored)

    def decode_tensors(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return embeddings.decode_tensors(tensors)


def _fitting(stored: Stored | None, inputs: int) -> Stored | None:
    """Return the format, or None for a layer that torchao leaves as it is, since its inputs do not fill groups."""
    skipped = stored is not None and stored.kind == "int4" and inputs % (stored.settings.group or inputs)
    return None if skipped else stored


def _schemes(config: Mapping[str, Any]) -> tuple[Stored | None, dict[str, Stored | None]]:
    """Return the format of all layers, and those of some by name: names before expressions. Raises ValueError."""
    stated = config.get("quant_type")
    if isinstance(stated, str):
        raise ValueError(f"does not read files of old versions, which are pickles: quant_type is {stated!r:.80}")
    inner = stated.get("default") if isinstance(stated, Mapping) else None
    if not isinstance(inner, Mapping) or inner.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return read(inner), {}
    data = inner.get("_data")
    named = (data.get("fqn_to_config") or data.get("module_fqn_to_config")) if isinstance(data, Mapping) else None
    if not isinstance(named, Mapping):
        raise ValueError("finds no 'fqn_to_config'")
    found = {str(name).removesuffix(".weight"): read(each) for name, each in named.items()}
    every = found.pop(_DEFAULT, None)
    return every, dict(sorted(found.items(), key=lambda item: item[0].startswith("re:")))


class IntxScheme(Quantized):
    """A scheme for numbers int8 [n, k] with scales and zero points [n, groups]; int8 has no zero points."""

    def __init__(self, shared: Shared, dtype: torch.dtype | None, stored: Stored) -> None:
        super().__init__(shared, dtype, stored.wide)
        self.settings = settings = stored.settings
        offsets = not settings.symmetric and not has_room(settings.bits, settings.group)
        self.form = kept(settings.bits, settings.group, stored.wide, offsets)

    def allocate(self, layer: Any) -> None:
        self.given, k, group = layer.weight.dtype, layer.in_features, self.settings.group
        if group and k % group:
            raise CheckpointError(f"{k} inputs of a layer are not a whole number of groups of {group}.")
        groups = k // (group or k)
        made = {
            NUMBERS: checkpoint_parameter(layer, (-1, k), torch.int8),
            SCALES: checkpoint_parameter(layer, (-1, groups), torch.float32, broadcast=not group),
        }
        if self.settings.symmetric:
            layer.ignored_tensors = (*layer.ignored_tensors, ZEROS)
        else:
            made[ZEROS] = checkpoint_parameter(layer, (-1, groups), torch.int8, broadcast=not group)
        layer.weight = None
        for name, parameter in made.items():
            setattr(layer, name, parameter)

    def weights(self, layer: Any) -> Integers:
        numbers, scales = getattr(layer, NUMBERS).detach(), getattr(layer, SCALES).detach()
        bits, group = self.settings.bits, self.settings.group
        zeros = None if self.settings.symmetric else getattr(layer, ZEROS).detach().to(torch.int16)
        if bits == 8:
            return Integers(numbers, scales, zeros, bits, group)
        half = 1 << (bits - 1)
        if bool(((numbers < -half) | (numbers >= half)).any()):
            raise CheckpointError(f"A quantized weight of the checkpoint is not a number of {bits} bits.")
        return Integers((numbers + half).to(torch.uint8), scales, None if zeros is None else zeros + half, bits, group)
