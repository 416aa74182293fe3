"""The CPU, with one thread and in float32: sums are taken in the same order everywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.platform import DeviceCaps, DeviceMemory, Platform


class ExampleMemory(DeviceMemory):
    def cache_bytes(self, config: DeviceSettings) -> int:
        return min(int(config.env.cpu_kvcache_space * 2**30), memory_bytes())


class ExamplePlatform(Platform):
    def __init__(self) -> None:
        self._memory = ExampleMemory()

    @classmethod
    def refuses(cls) -> str | None:
        return None

    def prepare(self, config: DeviceSettings) -> DeviceCaps:
        torch.set_num_threads(1)
        return DeviceCaps("cpu", "one thread in float32", memory_bytes())

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


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
