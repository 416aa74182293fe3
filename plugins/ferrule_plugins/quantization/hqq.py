"""HQQ (https://mobiusml.github.io/hqq_blog): a weight is (number - zero) * scale, with zero points that are floats.

Layers have `W_q`, `scale` and `zero` (https://github.com/mobiusml/hqq, hqq/core/quantize.py and bitpack.py). A matrix
is cut into groups in its order in memory: of neighbouring inputs (``axis`` 1), or of weights that are far apart
(``axis`` 0), which no kernel here multiplies. The rows of groups are packed into bytes, or words for 3 bits, the
first of them highest: of 4 bits, the first half of the rows is in the upper half of the bytes. Numbers of 5 and 6 bits
have a byte each, and 1.58 bits, three values, are packed as 2. ``view_as_float`` says that the bytes are called floats.

Scales and zero points that are quantized themselves (``scale_quant_params``, ``zero_quant_params``) are in HQQ's own
files alone, see `ferrule_plugins.load_format.hqq_file`. Newer versions of HQQ ignore these settings, and keep floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_plugins.load_format.hqq_file import FILE, PACKED, is_hqq, settings, unpacked
from ferrule_plugins.load_format.pt import entries
from ferrule_quant.decoded_parameters import decoded_parameter
from ferrule_quant.method import CheckedMethod
from ferrule_quant.mixed_projections import side_by_side
from ferrule_quant.names import means, names_of, spellings
from ferrule_quant.packed_words import outputs
from ferrule_quant.products import Floats, Integers, Quantized, Shared, Wide, kept

_PACKING = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_META = (  # what else a layer has in a file
    *("axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta", "optimize"),
    *("packing", "quant_scale", "quant_zero", "round_zero", "shape", "stores_quant_config", "unpack_view_dtype"),
    "view_as_float",
)
_TERNARY = 1.58
_FAR = "groups of HQQ's axis 0 are not neighbouring inputs: such weights take 16 bits, or 32 with --dtype float32"


@dataclass(frozen=True)
class Settings:
    """The settings of one layer. A group of 0 is all inputs, or with `axis` 0 all outputs."""

    bits: int
    group: int
    axis: int

    @classmethod
    def of(cls, stated: Any) -> Settings:
        """Read the settings of a configuration. Raises ValueError with what is not supported."""
        if not isinstance(stated, Mapping) or not isinstance(stated.get("weight_quant_params"), Mapping):
            raise ValueError("finds no 'weight_quant_params'")
        weights = stated["weight_quant_params"]
        bits, group, axis = weights.get("nbits"), weights.get("group_size"), weights.get("axis", 0)
        bits = 2 if bits == _TERNARY else bits
        if type(bits) is not int or bits not in _PACKING:
            raise ValueError(f"reads 1, 1.58, 2, 3, 4, 5, 6 and 8 bits, and the checkpoint has {bits!r}")
        if group is not None and (type(group) is not int or group < 1) or axis not in (0, 1):
            raise ValueError(f"takes groups of 1 or more along axis 0 or 1, not {group!r} and {axis!r}")
        if not weights.get("channel_wise", True):
            raise ValueError("does not read weights that are not quantized channel-wise")
        return cls(bits, group or 0, axis)


class Hqq(CheckedMethod):
    conformance = "ferrule_testkit.samples.integers:HQQ"
    formats = ("hqq",)
    left_keys = ("skip_modules",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._one, self._several = _read(config)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        _read(config)

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        file = folder / FILE
        if not file.is_file():
            return {}
        content = entries(file)
        return settings(content) if is_hqq(content) else {}

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        found = [self._settings(name) for name in names_of(layer)]
        dtype = torch.float32 if layer.head else None
        return side_by_side(layer, found, lambda own: HqqScheme(self.shared, dtype, own))

    def _settings(self, name: str) -> Settings | None:
        if any(means(pattern, name) for pattern in self.left):
            return None
        if self._one is not None:
            return self._one
        known = next((each for each in spellings(name) if each in self._several), None)  # files name every layer
        if known is not None:
            return self._several[known]
        return next((own for pattern, own in self._several.items() if means(pattern, name)), None)


def _read(config: Mapping[str, Any]) -> tuple[Settings | None, dict[str, Settings]]:
    """Return the settings of all layers, or those of the layers that are named. Raises ValueError."""
    stated = config.get("quant_config")
    if isinstance(stated, Mapping) and stated and "weight_quant_params" not in stated:
        return None, {name: Settings.of(each) for name, each in stated.items()}
    return Settings.of(stated), {}


class HqqScheme(Quantized):
    """A scheme with parameters `W_q` uint8 [n, k], unpacked, `scale` and `zero` [n, groups].

    With axis 0 these two are [n / group, k].
    """

    def __init__(self, shared: Shared, dtype: torch.dtype | None, settings: Settings) -> None:
        super().__init__(shared, dtype, wide=True)
        self.settings = settings

    def allocate(self, layer: Any) -> None:
        self.given, k, group = layer.weight.dtype, layer.in_features, self.settings.group
        self.form = kept(self.settings.bits, group, True, True) if self.settings.axis else Floats(self.given)
        if self.settings.axis:
            whole, shape = k % (group or k) == 0, (-1, k // (group or k))
        else:
            whole, shape = not group or all(n % group == 0 for n in outputs(layer)), (-1, k)
        if not whole:
            raise CheckpointError(f"A layer of {k} inputs has groups of {group}, which reach into the next output.")
        numbers = decoded_parameter(layer, (-1, k), torch.uint8, self._numbers)
        scale, zero = (
            decoded_parameter(layer, shape, torch.float32, lambda given, size: given.float().reshape(size), self._rows)
            for _ in range(2)
        )
        layer.ignored_tensors = (*layer.ignored_tensors, *_META)
        layer.weight, layer.W_q, layer.scale, layer.zero = None, numbers, scale, zero

    def _rows(self, count: int) -> int:
        """Return how many rows of scales there are for `count` outputs."""
        return count if self.settings.axis else count // (self.settings.group or count)

    def _numbers(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Unpack the numbers, without those that fill up the last row of words.

        Raises ValueError where they do not fit the shape.
        """
        bits, size = self.settings.bits, shape.numel()
        width, per = PACKED[_PACKING[bits]]
        words = packed.contiguous().view(torch.int32 if bits == 3 else torch.uint8)
        if not size <= words.numel() * per < size + per * words.shape[-1]:
            raise ValueError("another number of weights")
        flat = unpacked(words, width, per).flatten()[:size].to(torch.uint8)
        if width > bits and bool((flat >> bits).any()):
            raise ValueError("numbers of more bits")
        return flat.reshape(shape)

    def weights(self, layer: Any) -> Integers | Wide:
        numbers, scale, zero = layer.W_q.detach(), layer.scale.detach(), layer.zero.detach()
        if self.settings.axis == 0:
            rows = outputs(layer)
            kept = [self._rows(count) for count in rows]
            parts = zip(numbers.split(rows), scale.split(kept), zero.split(kept), strict=True)
            return Wide(torch.cat([self._far_apart(*part) for part in parts]), _FAR)
        bits = self.settings.bits
        if bits == 8:
            numbers, zero = (numbers.to(torch.int16) - 128).to(torch.int8), zero - 128
        return Integers(numbers, scale, zero, bits, self.settings.group)

    def _far_apart(self, numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return weights [n, k] where every so many outputs share scales and zero points [n / group, k]."""
        weight = (numbers.view(-1, *scale.shape) - zero) * scale
        return weight.flatten(0, 1).to(self.given)
