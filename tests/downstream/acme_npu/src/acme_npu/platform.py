"""Acme's NPU as a platform: memory of its own, two steps in flight, and a few kernels. Torch computes the rest.

ACME_NPU_COUNT=0 unplugs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from acme_npu.device import plugged_in
from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.platform import DeviceCaps, DeviceMemory, Execution, Platform
from ferrule.log import Log
from ferrule_nn import LayerKernels
from ferrule_quant import Products, Quantized

_log = Log("acme_npu")
_MEMORY = 64 << 20


class AcmeMemory(DeviceMemory):
    def cache_bytes(self, config: DeviceSettings) -> int:
        return int(_MEMORY * config.cache.gpu_memory_utilization)


class AcmeNorm:
    """RMS norms, in one pass over a row; `calls` are counted."""

    calls = 0

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        self._weight, self._eps = weight.detach() + offset, eps
        self.size = len(weight)

    def accepts(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        AcmeNorm.calls += 1
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._weight

    def after(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + scale * y
        return total, self(total)


class AcmeProducts(Products):
    """Torch's products, whose `calls` are counted."""

    calls = 0

    def quantized(self, scheme: Quantized, layer: Any, form: Any, given: Any) -> Any:
        multiply = super().quantized(scheme, layer, form, given)

        def counted(layer: Any, x: torch.Tensor) -> torch.Tensor:
            AcmeProducts.calls += 1
            return multiply(layer, x)

        return counted


class AcmeExecution(Execution):
    def depth(self) -> int:
        return 2

    def kernels(self) -> Kernels:
        """Return kernels that allocate memory for weights only when they come: the NPU has little."""
        layers = LayerKernels(dtypes=(torch.float32,), rms_norm=AcmeNorm, late=True)
        return Kernels((layers, AcmeProducts("Acme's kernels for them are slow")))


class AcmeNpu(Platform):
    def __init__(self) -> None:
        self._memory = AcmeMemory()
        self._execution = AcmeExecution()

    @classmethod
    def refuses(cls) -> str | None:
        return "no NPU is plugged in" if os.environ.get("ACME_NPU_COUNT") == "0" else None

    def prepare(self, config: DeviceSettings) -> DeviceCaps:
        _log.info("npu ready", memory=_MEMORY)
        return DeviceCaps("acme_npu", "Acme NPU 3", _MEMORY, frozenset({"matrices"}))

    def device(self) -> torch.device:
        return plugged_in()

    def dtype(self, requested: str, checkpoint: Mapping[str, Any]) -> torch.dtype:
        if requested not in ("auto", "float", "float32"):
            raise ConfigError(f"--dtype {requested!r}: Acme's NPU computes in float32.")
        return torch.float32

    def attention_order(self) -> tuple[str, ...]:
        return ("acme_paged", "torch_sdpa")

    def memory(self) -> DeviceMemory:
        return self._memory

    def execution(self) -> Execution:
        return self._execution
