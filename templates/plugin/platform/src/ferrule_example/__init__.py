"""The CPU, with one thread and in float32: sums are taken in the same order everywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.platform import DeviceCaps, DeviceMemory, Execution, Platform
from ferrule_nn import LayerKernels


class ExampleMemory(DeviceMemory):
    def cache_bytes(self, config: DeviceSettings) -> int:
        return min(int(config.env.cpu_kvcache_space * 2**30), memory_bytes())


class ExampleExecution(Execution):
    """An execution in which torch computes everything but RMS norms: each part of `Kernels`, and each kernel in it, is
    optional.
    """

    def kernels(self) -> Kernels:
        return Kernels((LayerKernels(dtypes=(torch.float32,), rms_norm=ExampleNorm),))


class ExampleNorm:
    """A kernel, as `ferrule_nn.ops.Norm` describes it. It is made once for each layer."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        self.weight, self.eps, self.size = weight.detach() + offset, eps, len(weight)

    def accepts(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (self.size,), self.weight, self.eps)

    def after(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + scale * y
        return total, self(total)


class ExamplePlatform(Platform):
    def __init__(self) -> None:
        self._memory = ExampleMemory()
        self._execution = ExampleExecution()

    @classmethod
    def refuses(cls) -> str | None:
        return None

    def prepare(self, config: DeviceSettings) -> DeviceCaps:
        torch.set_num_threads(1)
        return DeviceCaps("cpu", "one thread in float32", memory_bytes(), frozenset({"host_memory"}))

    def device(self) -> torch.device:
        return torch.device("cpu")

    def dtype(self, requested: str, checkpoint: Mapping[str, Any]) -> torch.dtype:
        if requested not in {"auto", "float", "float32"}:
            raise ConfigError(f"--dtype {requested!r}: this platform computes in float32.")
        return torch.float32

    def attention_order(self) -> tuple[str, ...]:
        return ("torch_sdpa",)

    def memory(self) -> DeviceMemory:
        return self._memory

    def execution(self) -> Execution:
        return self._execution


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
