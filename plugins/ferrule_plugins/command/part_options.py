"""Options of `ferrule serve` that another command takes, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from ferrule.config import Config
from ferrule.config.option import Option, opt, option_of
from ferrule.config.parse import config_sections

Taken = Mapping[str, Sequence[str]]  # names of fields, by section of `Config`


def sections(taken: Taken, said: Mapping[str, Mapping[str, Any]]) -> dict[str, type]:
    """Return sections with the fields in `taken` alone; `said` has attributes of options that differ from a
    server's.
    """
    return {key: _part(config_sections()[key], names, said) for key, names in taken.items()}


def whole(config: Config, taken: Taken) -> Config:
    """Return the configuration with its own sections in place of the partial ones, as the loading of a model expects
    them.
    """
    parts: dict[str, Any] = {}
    for key, names in taken.items():
        parts[key] = config_sections()[key](**{name: getattr(getattr(config, key), name) for name in names})
    return dataclasses.replace(config, **parts)


def _part(cls: type, names: Sequence[str], said: Mapping[str, Mapping[str, Any]]) -> type:
    """Return a section of the same title with the fields `names` alone."""
    hints, found = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    rows = []
    for name in names:
        field, option = found[name], dataclasses.replace(option_of(found[name]), **said.get(name, {}))
        meta = {attribute.name: getattr(option, attribute.name) for attribute in dataclasses.fields(Option)}
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        rows.append((name, hints[name], opt(default, **meta)))
    return dataclasses.make_dataclass(cls.__name__, rows, namespace={"__doc__": cls.__doc__}, frozen=True, kw_only=True)
