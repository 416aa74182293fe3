"""Scales of an fp8 cache: what is cached, times its scale, are keys or values.

They are those of the checkpoint, of a file, or calculated when the model is loaded. Names in checkpoints:
https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/, and older ones of the same tools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ferrule.checkpoint import read_json
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import HeadScaledCache, Model, ScaledCache

_LAYER = r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,6})\.(?:self_attn|attn|attention|self_attention)\."
_SCALE = re.compile(
    _LAYER + r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?(?P<part>k|v|kv)_scale|(?P<output>[kv])_proj\.output_scale)"
)
_UNUSED = re.compile(_LAYER + r"(?:attn\.)?(?:q_scale|prob_output_scale|prob_scale|q_proj\.(?:output_scale|q_scale))")
_CACHE = re.compile(r"layers\.(\d{1,6})\.")  # the name of a layer's cache

_MOST_HEADS = 1 << 16
_KEYS, _VALUES = 200.0, 100.0  # what the largest key and value that were seen become at most: of 448 or 57344
_LEAST = 2.0**-64  # whatever is divided or multiplied by it, or by its inverse, stays a float32
Scales = tuple[float, ...]  # one of a layer, or one for each of its heads
_NONE: Scales = (1.0,)


@dataclass
class CacheScales:
    """The scales of an fp8 KV cache: taken from among a checkpoint's tensors, and given to the layers where they are
    `used`.

    A checkpoint has one scale for a layer's keys or values, or one for each head of them, in a tensor of any shape.
    Where scales are to be `calculated`, layers get none before `measure` was called.
    """

    used: bool
    calculated: bool = False
    stated: dict[int, float] = field(default_factory=dict)  # which the user gave, for keys and values
    found: dict[str, dict[int, Scales]] = field(default_factory=lambda: {"k": {}, "v": {}})
    measured: dict[str, dict[int, float]] = field(default_factory=lambda: {"k": {}, "v": {}})

    @classmethod
    def of(cls, file: str | None, kind: str, calculated: bool = False) -> CacheScales:
        """Make the scales for a cache of the type `kind`, from a file, if there is one, with a number for each layer's
        keys and values.

        The file: ``{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {LAYER: NUMBER}}}}``. Raises
        ConfigError for a file that cannot be used.
        """
        scales = cls(used=kind.startswith("fp8"), calculated=calculated)
        if file is None:
            return scales
        if calculated:
            raise ConfigError("--calculate-kv-scales and --quantization-param-path both say what the scales are.")
        if not scales.used:
            raise ConfigError(f"--quantization-param-path has scales of an fp8 cache, and the cache is of type {kind}.")
        if not Path(file).is_file():  # a device or a pipe might have no end
            raise ConfigError(f"--quantization-param-path {file} is not a file.")
        try:
            stated = read_json(Path(file))
            ranks = stated["kv_cache"]["scaling_factor"]
            if stated["kv_cache"]["dtype"] != "float8_e4m3fn" or list(ranks) != ["0"]:
                raise ValueError("it is not of float8_e4m3fn for one worker")
            numbers = {int(layer): _positive(f"of layer {layer}", float(value)) for layer, value in ranks["0"].items()}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"--quantization-param-path {file} is not read: {error!r:.200}.") from None
        scales.stated = numbers
        return scales

    @staticmethod
    def takes(name: str) -> bool:
        """Return whether a tensor of this name is a cache scale, or a related tensor that nothing uses."""
        return _SCALE.fullmatch(name) is not None or _UNUSED.fullmatch(name) is not None

    def without(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are not cache scales, and keep the scales. Raises CheckpointError for scales that are
        not positive numbers.
        """
        for name, tensor in tensors:
            scale = _SCALE.fullmatch(name)
            if scale:
                for part in scale["part"] or scale["output"]:
                    self.found[part][int(scale[1])] = _numbers(repr(name), tensor)
            elif not _UNUSED.fullmatch(name):
                yield name, tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's scales as tensors, under names that `without` knows."""
        scales = ((part, layer, scale) for part, layers in self.found.items() for layer, scale in layers.items())
        return {
            f"layers.{layer}.self_attn.{part}_scale": torch.tensor(scale).squeeze() for part, layer, scale in scales
        }

    def measure(self, largest: Mapping[str, tuple[float, float]]) -> str:
        """Calculate the scales from the `largest` key and value that each layer cached; returns what the log says.

        They are powers of two, so dividing by them rounds nothing, and the last bits of a sum hardly change them.
        Raises CheckpointError for a layer whose keys or values are not finite.
        """
        for name, both in largest.items():
            place = _CACHE.match(name)
            if not all(math.isfinite(most) for most in both):
                raise CheckpointError(f"--calculate-kv-scales: keys or values of {name} are not finite numbers.")
            if place:
                keys, values = both
                self.measured["k"][int(place[1])] = _power_of_two(keys / _KEYS)
                self.measured["v"][int(place[1])] = _power_of_two(values / _VALUES)
        if not self.measured["k"]:
            return "--calculate-kv-scales calculated nothing: no attention takes scales of its cache"
        ranges = (sorted(self.measured[part].values()) for part in "kv")
        keys_said, values_said = (f"{each[0]:g} to {each[-1]:g}" for each in ranges)
        return f"scales of {len(self.measured['k'])} layers' caches calculated: keys {keys_said}, values {values_said}"

    def give(self, model: Model) -> str | None:
        """Give the scales to the model's layers. Returns a message for the log, or None."""
        if self.calculated and not self.measured["k"]:  # not yet, or, without a cache of fp8, never
            return None
        keys: Mapping[int, Scales] = self.found["k"]
        values: Mapping[int, Scales] = self.found["v"]
        if self.calculated or self.stated:
            alone = [self.measured[part] if self.calculated else self.stated for part in "kv"]
            keys, values = ({layer: (scale,) for layer, scale in each.items()} for each in alone)
        layers = keys.keys() | values.keys()
        if not layers:
            return None
        if not self.used:
            return "the checkpoint's scales of an fp8 cache are used with --kv-cache-dtype fp8"
        left = set(layers)
        for part in model.modules() if isinstance(model, torch.nn.Module) else ():
            if isinstance(part, ScaledCache) and (place := _CACHE.match(part.name)) and int(place[1]) in layers:
                layer = int(place[1])
                if _set(part, keys.get(layer, _NONE), values.get(layer, _NONE)):
                    left.discard(layer)
        return f"the scales of {len(left)} layers' caches are not used: no attention takes them" if left else None


def _set(part: ScaledCache, keys: Scales, values: Scales) -> bool:
    """Set a layer's scales. Returns whether the layer accepts such scales."""
    if len(keys) == len(values) == 1:
        part.set_cache_scales(keys[0], values[0])
        return True
    if not isinstance(part, HeadScaledCache):
        return False
    heads = max(len(keys), len(values))
    part.set_head_scales(*(each * heads if len(each) == 1 else each for each in (keys, values)))
    return True


def _numbers(name: str, tensor: torch.Tensor) -> Scales:
    if not tensor.is_floating_point() or not 0 < tensor.numel() <= _MOST_HEADS:
        raise CheckpointError(f"The cache's scale {name} must be one positive number, or one for each head.")
    return tuple(_positive(name, value) for value in tensor.flatten().tolist())


def _power_of_two(value: float) -> float:
    """Return the least power of two that is not below a value, between 2^-63 and 2^63; 1 for 0."""
    return math.ldexp(1.0, max(-63, min(63, math.ceil(math.log2(value))))) if value > 0 else 1.0


def _positive(name: str, value: float) -> float:
    if not _LEAST < value < 1 / _LEAST:
        raise CheckpointError(f"The cache's scale {name} must be a positive number, from {_LEAST:.0e} on, not {value}.")
    return value
