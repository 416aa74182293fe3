"""Scales of an fp8 cache that a checkpoint has beside its weights: what is cached, times its scale, are keys or values.

Names: https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/, and older ones of the same tools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ferrule.checkpoint import read_json
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.model import Model, ScaledCache

_LAYER = r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,6})\.(?:self_attn|attn|attention|self_attention)\."
_SCALE = re.compile(
    _LAYER + r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?(?P<part>k|v|kv)_scale|(?P<output>[kv])_proj\.output_scale)"
)
_UNUSED = re.compile(_LAYER + r"(?:attn\.)?(?:q_scale|prob_output_scale|prob_scale|q_proj\.(?:output_scale|q_scale))")
_CACHE = re.compile(r"layers\.(\d{1,6})\.")  # the name of a layer's cache

_LEAST = 2.0**-64  # whatever is divided or multiplied by it, or by its inverse, stays a float32


@dataclass
class CacheScales:
    """Takes the scales from among the tensors of a checkpoint, and gives them to the layers where they are `used`."""

    used: bool
    stated: dict[int, float] = field(default_factory=dict)  # which the user gave, for keys and values
    found: dict[str, dict[int, float]] = field(default_factory=lambda: {"k": {}, "v": {}})

    @classmethod
    def of(cls, file: str | None, kind: str) -> CacheScales:
        """For a cache of the type `kind`; of a file, if there is one, with a number for each layer's keys and values.

        The file: ``{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {LAYER: NUMBER}}}}``. Raises
        ConfigError for a file that is not read.
        """
        scales = cls(used=kind.startswith("fp8"))
        if file is None:
            return scales
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

    def without(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are not such scales. Raises CheckpointError for a scale that is not a positive number."""
        for name, tensor in tensors:
            scale = _SCALE.fullmatch(name)
            if scale:
                for part in scale["part"] or scale["output"]:
                    self.found[part][int(scale[1])] = _positive(repr(name), _number(tensor))
            elif not _UNUSED.fullmatch(name):
                yield name, tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the checkpoint, under the names that `without` knows."""
        scales = ((part, layer, scale) for part, layers in self.found.items() for layer, scale in layers.items())
        return {f"layers.{layer}.self_attn.{part}_scale": torch.tensor(scale) for part, layer, scale in scales}

    def give(self, model: Model) -> str | None:
        """Returns what the log should say of them, if anything."""
        keys, values = (self.stated or self.found[part] for part in "kv")
        layers = keys.keys() | values.keys()
        if not layers:
            return None
        if not self.used:
            return "the checkpoint's scales of an fp8 cache are used with --kv-cache-dtype fp8"
        left = set(layers)
        for part in model.modules() if isinstance(model, torch.nn.Module) else ():
            if isinstance(part, ScaledCache) and (place := _CACHE.match(part.name)) and int(place[1]) in layers:
                layer = int(place[1])
                part.set_cache_scales(keys.get(layer, 1.0), values.get(layer, 1.0))
                left.discard(layer)
        return f"the scales of {len(left)} layers' caches are not used: no attention takes them" if left else None


def _number(tensor: torch.Tensor) -> float:
    """NaN for what is not read, one for each head among that."""
    return float(tensor) if tensor.numel() == 1 and tensor.is_floating_point() else math.nan


def _positive(name: str, value: float) -> float:
    if not _LEAST < value < 1 / _LEAST:
        raise CheckpointError(
            f"The cache's scale {name} must be one positive number for all heads, from {_LEAST:.0e} on, not {value}."
        )
    return value
