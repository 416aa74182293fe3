"""The layers that names in a checkpoint's configuration mean: names of projections, before any are merged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import regex

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer

_CLASS = "Linear"
_SECONDS = 1.0  # for one name: expressions by which checkpoints mean layers take microseconds
_LONGEST = 1000  # characters of an expression, with what its counts repeat: it is compiled to as much memory


def listed(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the patterns that a configuration has under `keys`.

    Raises CheckpointError unless they are lists of strings.
    """
    found: list[str] = []
    for key in keys:
        values = config.get(key)
        if not isinstance(values, list | tuple | None) or not all(isinstance(value, str) for value in values or ()):
            raise CheckpointError(f"quantization_config: {key!r} is not a list of names of layers: {values!r:.200}.")
        found.extend(values or ())
    return tuple(found)


def chosen(layer: LinearLayer, patterns: Iterable[str]) -> bool:
    """Return whether one of `patterns` means the layer: its name, whole parts of it, or an expression after ``re:``.

    Raises CheckpointError where the patterns mean some of the projections that the layer merges, and not the others,
    and for an expression that is not valid or takes too long.
    """
    found = [any(means(pattern, name) for pattern in patterns) for name in names_of(layer)]
    if any(found) and not all(found):
        raise CheckpointError(
            f"The checkpoint quantizes some of {', '.join(layer.projections)} in {layer.name} and not the others,"
            " which are one matrix here."
        )
    return found[0]


def targeted(layer: LinearLayer, targets: Iterable[str]) -> bool:
    """Return whether a target of compressed-tensors means the layer: a pattern of `chosen`, or the class of all."""
    return _CLASS in targets or chosen(layer, targets)


def names_of(layer: LinearLayer) -> list[str]:
    """Return the names of the projections that the layer merges, or its own."""
    before = layer.name.rpartition(".")[0]
    return [f"{before}.{part}" if before else part for part in layer.projections] or [layer.name]


def globbed(name: str) -> str:
    """Turn a name with ``*`` for any characters into a pattern of `chosen`."""
    return name if "*" not in name else "re:" + ".*".join(re.escape(part) for part in name.split("*")) + "$"


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that checkpoints give a layer, such as ``model.layers`` for our ``layers``."""
    return (name, f"model.{name}", f"model.language_model.{name}", f"language_model.model.{name}")


def means(pattern: str, name: str) -> bool:
    """Return whether the pattern means the projection of that name; see `chosen`."""
    if pattern.startswith("re:"):
        return any(matches(pattern[3:], each) for each in spellings(name))
    return any(f".{pattern}." in f".{each}." for each in spellings(name))


def matches(expression: str, name: str, where: str = "quantization_config", seconds: float = _SECONDS) -> bool:
    """Return whether the expression matches from the name's beginning on.

    Raises CheckpointError, which says where the expression stands, if it is not valid or takes longer than `seconds`.
    """
    counts = re.findall(r"\d+", " ".join(re.findall(r"\{[^{}]*\}", expression[:_LONGEST])))
    try:
        if len(expression) > _LONGEST or math.prod(int(count) or 1 for count in counts) > _LONGEST:
            raise ValueError("it is too long")
        re.compile(expression)  # stricter than `regex`, which also has recursion
        return regex.match(expression, name, timeout=seconds, concurrent=True) is not None
    except (TimeoutError, MemoryError):
        raise CheckpointError(f"{where}: the expression {expression!r:.200} takes too long.") from None
    except (re.error, regex.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a regular expression: {expression!r:.200}: {error}.") from None
