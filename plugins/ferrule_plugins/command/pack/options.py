"""The options of `ferrule pack`: the place to write to, and the options of `ferrule serve` that decide the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrule.config import Config
from ferrule.config.option import opt
from ferrule_files import commands

# Sections of `Config`, and what is taken of them.
_TAKEN = {
    "model": (
        "model",
        "quantization",
        "dtype",
        "revision",
        "hub",
        "hf_token",
        "hf_config_path",
        "config_format",
        "hf_overrides",
        "model_impl",
        "trust_remote_code",
    ),
    "load": ("load_format", "download_dir", "model_loader_extra_config", "ignore_patterns", "use_tqdm_on_load"),
    "observability": ("log_level", "log_config_file", "debug"),
    "plugins": ("plugins_allow", "plugins_deny", "plugins_prefer", "plugin"),
}
_SAID: Mapping[str, Mapping[str, Any]] = {  # otherwise than for a server
    "model": {"doc": "Folder or hub id of the model."},
    "quantization": {"doc": "Quantization plugin. Default: what the checkpoint asks for, else none.", "common": True},
}


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Options of the folder that is written."""

    output: str | None = opt(
        None,
        "Folder to write. Default: packed-METHOD, packed-TYPE, sharded-RANKS or the format, in the model's folder.",
        aliases=("-o",),
        common=True,
    )
    format: str = opt(
        "packed",
        "What is written. packed: weights as the CPU's kernels read them; sharded_state: float weights as the workers "
        "of vLLM hold them; a load format that can be written, as tensorizer: a checkpoint's tensors as they are.",
        common=True,
    )
    tensor_parallel_size: int = opt(
        1, "Number of workers whose state --format sharded_state writes.", ge=1, le=1024, aliases=("-tp",)
    )
    encryption_keyfile: str | None = opt(
        None,
        "File with the key that a load format encrypts tensors with, as tensorizer does; a new one is written if it is "
        "missing.",
    )
    force: bool = opt(False, "Replace a folder that an earlier run wrote.", common=True)


def sections() -> Mapping[str, type]:
    """Return all sections of options of the command."""
    return {**commands.sections(_TAKEN, _SAID), "pack": PackConfig}


def whole(config: Config) -> Config:
    """Return the configuration with its own sections in place of the partial ones, on the CPU, to load the model
    with.
    """
    full = commands.whole(config, _TAKEN)
    return dataclasses.replace(full, device=dataclasses.replace(config.device, device="cpu"))
