"""Which layers a checkpoint's configuration means: it names them as its own model does, before any are merged."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ferrule.errors import CheckpointError
from ferrule.interfaces.quantization import LinearLayer


def chosen(layer: LinearLayer, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` means the layer: its name, whole parts of that, or an expression after ``re:``.

    Raises CheckpointError where it means some of the projections that the layer merges, and not the others.
    """
    found = [any(_means(pattern, name) for pattern in patterns) for name in _names(layer)]
    if any(found) and not all(found):
        raise CheckpointError(
            f"The checkpoint quantizes some of {', '.join(layer.parts)} in {layer.name} and not the others,"
            " which are one matrix here."
        )
    return found[0]


def _names(layer: LinearLayer) -> list[str]:
    before = layer.name.rpartition(".")[0]
    return [f"{before}.{part}" if before else part for part in layer.parts] or [layer.name]


def _means(pattern: str, name: str) -> bool:
    """Checkpoints say ``model.layers`` where the model's parts are called ``layers``."""
    names = (name, f"model.{name}")
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)
