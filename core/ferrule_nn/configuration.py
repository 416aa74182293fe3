"""Reading config.json, whose names for one number differ between families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrule.errors import CheckpointError


def need(config: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of `names` that config.json has. Raises CheckpointError if it has none of them."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise CheckpointError(f"config.json lacks {' or '.join(repr(name) for name in names)}.")


def first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Return the value of the first of `names` that config.json has and that is not null, else `default`."""
    return next((config[name] for name in names if config.get(name) is not None), default)


def number(value: Any) -> float:
    """Read a number, or transformers' spelling of one that JSON does not have: {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)
