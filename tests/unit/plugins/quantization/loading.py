"""Loads a checkpoint as an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ferrule.assembly.model import Loaded, load_model
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SchedulerConfig
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.interfaces.plugins import Plugins

ENV = Environment(cpu_kvcache_space=0.01, cpu_omp_threads_bind="auto")


def load_folder(folder: Path, plugins: Plugins, load_format: str = "auto", **model: Any) -> Loaded:
    """Load a folder. `model`: options of the section."""
    config = resolve(
        Config(
            model=ModelConfig(**{"model": str(folder), "dtype": "float32", **model}),
            load=LoadConfig(use_tqdm_on_load=False, load_format=load_format),
            scheduler=SchedulerConfig(max_num_seqs=2),
            cache=CacheConfig(),
            env=ENV,
        )
    )
    return load_model(config, plugins)
