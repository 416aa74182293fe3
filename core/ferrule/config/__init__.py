"""Configuration: frozen sections, resolved once."""

from ferrule.config.sections import (
    CacheConfig,
    Config,
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
    "DeviceConfig",
    "FrontendConfig",
    "LimitsConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginConfig",
    "SchedulerConfig",
]
