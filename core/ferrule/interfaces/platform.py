"""`platform`: a kind of device. Entry point name = what `--device` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ferrule.config import Config


@dataclass(frozen=True)
class DeviceCaps:
    """What a device can do. `features` are names such as "avx512_bf16", "amx_bf16", "sm90"."""

    platform: str
    name: str
    memory_bytes: int
    features: frozenset[str] = frozenset()


class Platform(ABC):
    @classmethod
    @abstractmethod
    def refuses(cls) -> str | None:
        """Say why this platform is not usable on this machine, or return None. Must be cheap."""

    @abstractmethod
    def prepare(self, config: Config) -> DeviceCaps:
        """Set up the device for this process (threads, allocator) and describe it."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device on which parameters and cache live."""

    @abstractmethod
    def dtype(self, requested: str, checkpoint: Mapping[str, Any]) -> torch.dtype:
        """Resolve `--dtype`. Raises ConfigError for a type that the device cannot compute in."""

    @abstractmethod
    def cache_bytes(self, config: Config) -> int:
        """Bytes for the KV cache, called after the weights are loaded."""

    @abstractmethod
    def attention_order(self) -> tuple[str, ...]:
        """Names of attention backends, first choice first."""

    def depth(self) -> int:
        """Steps in flight that pay off here: 2 where the device computes while the host plans."""
        return 1
