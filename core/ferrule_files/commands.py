"""What a command that works on a model's files begins with: options, of which some are those of `ferrule serve`, and
the start of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_type_hints

from ferrule.config import Config, Resolved
from ferrule.config.help import CommandUsage
from ferrule.config.option import Option, opt, option_of
from ferrule.config.parse import config_sections, parse_command
from ferrule.config.places import placed
from ferrule.env import before_libraries
from ferrule.interfaces.plugins import Plugins

__all__ = ["Taken", "CommandUsage", "opt", "parse_command", "prepared", "sections", "whole"]

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


@contextmanager
def prepared(config: Config, notices: Sequence[str], plugins: Plugins, area: str) -> Iterator[tuple[Resolved, Plugins]]:
    """Set up the log under `area`, check the options, and give the resolved configuration and the plugins that it
    selects.

    Enter it before torch is imported, which reads its settings then. Raises StartupError; one that is raised inside
    names file and line of the options that it is about. `notices` are those of the parsed command line.
    """
    from ferrule.launch.prepare import prepare

    ready, chosen = prepare(config, notices, plugins, area)
    before_libraries()
    with placed(config):
        yield ready, chosen


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
