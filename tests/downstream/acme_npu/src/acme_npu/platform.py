"""A device that there is none of: it computes on the CPU, and calls itself an NPU. ACME_NPU_COUNT=0 unplugs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.platform import DeviceCaps, DeviceMemory, Execution, Platform
from ferrule.log import Log

_log = Log("acme_npu")
_MEMORY = 64 << 20


class AcmeMemory(DeviceMemory):
    def cache_bytes(self, config: DeviceSettings) -> int:
        return int(_MEMORY * config.cache.gpu_memory_utilization)


class AcmeExecution(Execution):
    def depth(self) -> int:
        return 2


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
        return torch.device("cpu")

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
