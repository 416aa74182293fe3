"""What plugins are given of the configuration: the parts that are about their kind, and not all of it.

What a plugin wants to be told beside that is an option of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrule.config.resolved import ResolvedScheduler, WorkerSettings
from ferrule.config.sections import CacheConfig, Config, DeviceConfig, ObservabilityConfig
from ferrule.env import Environment


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """What a platform is given: the sections on its device, the cache and the steps, and options of the model."""

    device: DeviceConfig
    cache: CacheConfig
    scheduler: ResolvedScheduler
    env: Environment
    dtype: str  # as it was asked for, such as "auto"
    enforce_eager: bool
    max_seq_len_to_capture: int

    @classmethod
    def of(cls, config: WorkerSettings) -> DeviceSettings:
        return cls(
            device=config.device,
            cache=config.cache,
            scheduler=config.scheduler,
            env=config.env,
            dtype=config.model.dtype,
            enforce_eager=config.model.enforce_eager,
            max_seq_len_to_capture=config.model.max_seq_len_to_capture,
        )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What hooks are given: the names under which the model answers, the first for responses, and the log's section."""

    model_names: tuple[str, ...]
    observability: ObservabilityConfig

    @classmethod
    def of(cls, config: Config) -> ServerSettings:
        return cls(
            model_names=config.model.served_model_name or (config.model.model,), observability=config.observability
        )


@dataclass(frozen=True, kw_only=True)
class StatSettings(ServerSettings):
    """What a stat logger is given: the same, and the cache's section."""

    cache: CacheConfig

    @classmethod
    def of(cls, config: Config) -> StatSettings:
        return cls(**vars(ServerSettings.of(config)), cache=config.cache)
