"""What plugins are given of the configuration: the parts that are about their kind, and not all of it.

What a plugin wants to be told beside that is an option of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ferrule.config.chosen import chosen_plugins
from ferrule.config.report import defaults, origins, shown
from ferrule.config.resolved import ResolvedScheduler, WorkerSettings
from ferrule.config.sections import (
    CacheConfig,
    Config,
    DeviceConfig,
    FrontendConfig,
    ObservabilityConfig,
    SchedulerConfig,
)
from ferrule.env import Environment
from ferrule.plugin import Plugins


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The settings of a platform: the sections on its device, the cache and the steps, and options of the model."""

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
    """The settings of hooks: the names under which the model answers, the first for responses, and the log's
    section.
    """

    model_names: tuple[str, ...]
    observability: ObservabilityConfig

    @classmethod
    def of(cls, config: Config) -> ServerSettings:
        return cls(
            model_names=config.model.served_model_name or (config.model.model,), observability=config.observability
        )


@dataclass(frozen=True, kw_only=True)
class StatSettings(ServerSettings):
    """The settings of a stat logger: those of hooks, and the cache's section."""

    cache: CacheConfig

    @classmethod
    def of(cls, config: Config) -> StatSettings:
        return cls(**vars(ServerSettings.of(config)), cache=config.cache)


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The settings of a router: the sections that requests meet, and what it may tell of the others."""

    frontend: FrontendConfig  # without keys and the files of keys: these are always empty
    scheduler: SchedulerConfig
    task: str  # as it was asked for, such as "auto"
    max_logprobs: int
    skip_tokenizer_init: bool
    server_dev_mode: bool
    lora_updating: bool  # adapters may be loaded and unloaded while the server runs
    options: Mapping[str, Any]  # all options by name, to be told to an administrator: secrets are "(hidden)"
    origins: Mapping[str, str]  # where the values of `options` come from: "command line", "serve.yaml:3", "default" …
    defaults: Mapping[str, Any]  # of `options`, before anything was filled
    chosen: tuple[tuple[str, str], ...]  # (kind, name) of each plugin that the options choose, or that is on by default

    @classmethod
    def of(cls, config: Config, plugins: Plugins) -> RouterSettings:
        return cls(
            frontend=replace(config.frontend, api_key=(), api_key_file=None, admin_key=None, ssl_keyfile=None),
            scheduler=config.scheduler,
            task=config.model.task,
            max_logprobs=config.model.max_logprobs,
            skip_tokenizer_init=config.model.skip_tokenizer_init,
            server_dev_mode=config.env.server_dev_mode,
            lora_updating=config.lora.enable_lora and config.env.allow_runtime_lora_updating,
            options=shown(config),
            origins=origins(config),
            defaults=defaults(),
            chosen=tuple(chosen_plugins(config, plugins)),
        )
