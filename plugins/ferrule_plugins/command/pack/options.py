"""The options of `ferrule pack`: where it writes to, and what of `ferrule serve` decides which weights there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from ferrule.config import Config
from ferrule.config.option import Option, opt, option_of
from ferrule.config.parse import config_sections

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
    """What is written."""

    output: str | None = opt(
        None,
        "Folder to write. Default: packed-METHOD, or packed-TYPE, in the model's folder.",
        aliases=("-o",),
        common=True,
    )
    force: bool = opt(False, "Replace a folder that an earlier run wrote.", common=True)


def sections() -> Mapping[str, type]:
    """Every section of the command."""
    return {**{key: _part(config_sections()[key], names) for key, names in _TAKEN.items()}, "pack": PackConfig}


def whole(config: Config) -> Config:
    """The configuration with its own sections, as what loads a model expects them; it is loaded on the CPU."""
    parts: dict[str, Any] = {}
    for key, names in _TAKEN.items():
        parts[key] = config_sections()[key](**{name: getattr(getattr(config, key), name) for name in names})
    return dataclasses.replace(config, **parts, device=dataclasses.replace(config.device, device="cpu"))


def _part(cls: type, names: tuple[str, ...]) -> type:
    """A section of the same title with these fields alone."""
    hints, found = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    rows = []
    for name in names:
        field, option = found[name], dataclasses.replace(option_of(found[name]), **_SAID.get(name, {}))
        meta = {attribute.name: getattr(option, attribute.name) for attribute in dataclasses.fields(Option)}
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        rows.append((name, hints[name], opt(default, **meta)))
    return dataclasses.make_dataclass(cls.__name__, rows, namespace={"__doc__": cls.__doc__}, frozen=True, kw_only=True)
