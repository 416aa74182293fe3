"""Configuration: frozen sections as given, `Resolved`, which is what components get, and views of it for plugins."""

from ferrule.config.resolved import (
    LoRAModule,
    Resolved,
    ResolvedDecoding,
    ResolvedLoRA,
    ResolvedModel,
    ResolvedScheduler,
    WorkerSettings,
)
from ferrule.config.sections import (
    CacheConfig,
    Config,
    DecodingConfig,
    DeviceConfig,
    FrontendConfig,
    LimitsConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PluginConfig,
    SchedulerConfig,
)
from ferrule.config.views import DeviceSettings, RouterSettings, ServerSettings, StatSettings

__all__ = [
    "CacheConfig",
    "Config",
    "DecodingConfig",
    "DeviceConfig",
    "DeviceSettings",
    "FrontendConfig",
    "LimitsConfig",
    "LoRAConfig",
    "LoRAModule",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginConfig",
    "Resolved",
    "ResolvedDecoding",
    "ResolvedLoRA",
    "ResolvedModel",
    "ResolvedScheduler",
    "RouterSettings",
    "SchedulerConfig",
    "ServerSettings",
    "StatSettings",
    "WorkerSettings",
]
