"""`humming`, by which vLLM means kernels of its own for the formats of other methods: here a name for all of these.

https://github.com/vllm-project/vllm, vllm/model_executor/layers/quantization/humming.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule.interfaces.quantization import LinearLayer, LinearScheme
from ferrule_plugins.quantization.compressed import CompressedTensors
from ferrule_plugins.quantization.fp8 import Fp8Method
from ferrule_plugins.quantization.groupwise import Awq, Gptq
from ferrule_plugins.quantization.method import CheckedMethod
from ferrule_plugins.quantization.modelopt import ModelOpt
from ferrule_plugins.quantization.mxfp4 import Mxfp4

_METHODS: tuple[type[CheckedMethod], ...] = (Awq, Gptq, CompressedTensors, Fp8Method, ModelOpt, Mxfp4)


class AnyFormat(CheckedMethod):
    conformance = "ferrule_plugins.quantization.integer_samples:AWQ"
    formats = tuple(form for method in _METHODS for form in method.formats)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._method = _reader(config)(config)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        _reader(config).check(config)

    @classmethod
    def settings_of(cls, folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return _reader(config).settings_of(folder, config)

    def scheme(self, layer: LinearLayer) -> LinearScheme | None:
        return self._method.scheme(layer)

    def decoded(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return self._method.decoded(tensors)


def _reader(config: Mapping[str, Any]) -> type[CheckedMethod]:
    """The method that reads the format; GPTQ's where none is named, as in files of its own settings."""
    form = config.get("quant_method")
    return next((method for method in _METHODS if form in method.formats), Gptq)
