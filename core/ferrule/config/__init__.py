"""Configuration: frozen sections as given, and `Resolved`, which is what components get."""

from ferrule.config.resolved import Resolved, ResolvedDecoding, ResolvedModel, ResolvedScheduler
from ferrule.config.sections import (
    CacheConfig,
    Config,
    DecodingConfig,
    DeviceConfig,
    FrontendConfig,
    LimitsConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PluginConfig,
    SchedulerConfig,
)

__all__ = [
    "CacheConfig",
    "Config",
    "DecodingConfig",
    "DeviceConfig",
    "FrontendConfig",
    "LimitsConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginConfig",
    "Resolved",
    "ResolvedDecoding",
    "ResolvedModel",
    "ResolvedScheduler",
    "SchedulerConfig",
]
