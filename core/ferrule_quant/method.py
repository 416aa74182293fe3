"""The common part of quantization methods: a check of the configuration, and the layers that are not quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.platform import DeviceCaps
from ferrule.interfaces.quantization import LinearLayer, LinearScheme, QuantizationMethod
from ferrule_quant.names import listed
from ferrule_quant.products import Shared, cannot_run

_LONGEST = 500  # characters of a reason, which may quote the configuration


class CheckedMethod(QuantizationMethod):
    """A method that checks a checkpoint's configuration once.

    `shared` is for the schemes of one model; `left` has what the configuration lists under the keys `left_keys`.
    """

    left_keys: tuple[str, ...] = ()  # each has names or expressions of layers that are not quantized
    from_floats = False  # whether weights without a configuration are quantized as they load

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.shared = Shared()
        self.left = listed(config, *self.left_keys)

    @classmethod
    def refuses(cls, config: Mapping[str, Any], caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        if not config and not cls.from_floats:
            return "the weights are not quantized"
        try:
            cls.check(config)
        except (CheckpointError, ValueError) as error:
            return f"{error!s:.{_LONGEST}}"
        return cannot_run(dtype)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        """Check a checkpoint's configuration; by default, accept all. Raises ValueError or CheckpointError."""


class OneOf(CheckedMethod):
    """A name for several `methods`: the one for the checkpoint's format is used, or `usual` where none is named."""

    methods: tuple[type[CheckedMethod], ...] = ()
    usual: type[CheckedMethod]

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._method = self._reader(config)(config)

    @classmethod
    def _reader(cls, config: Mapping[str, Any]) -> type[CheckedMethod]:
        form = config.get("quant_method")
        return next((method for method in cls.methods if form in method.formats), cls.usual)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        cls._reader(config).check(config)

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return cls._reader(config).settings_of(folder, config)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return self._method.scheme(layer)

    def embedding(self, layer: LinearLayer) -> LinearScheme | None:
        return self._method.embedding(layer)

    def decode_tensors(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return self._method.decode_tensors(tensors)


def check_cache_scheme(scheme: Any) -> None:
    """Check that a `kv_cache_scheme` is fp8, with scales of layers or of single heads. Raises ValueError."""
    if not scheme:
        return
    read = {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "attn_head"), "dynamic": (False,)}
    if not isinstance(scheme, Mapping) or any(scheme.get(key, values[0]) not in values for key, values in read.items()):
        raise ValueError(f"reads scales of a cache in fp8, one for each layer or head, not kv_cache_scheme {scheme!r}")
