"""Plugins of Ferrule's own distributions that a bare installation does not have."""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType

from ferrule.errors import nearest

# kind:name → the extra of `ferrule` that brings the distribution which offers it
EXTRAS = MappingProxyType({"command:quantize": "quantize", "load_format:tensorizer": "tensorizer", "router:tgi": "tgi"})


def missing(kind: str, name: str) -> str:
    """Say how a plugin that is not installed can be, in a sentence; "" for one that Ferrule does not know."""
    extra = EXTRAS.get(f"{kind}:{name}")
    return f"{kind}:{name} is not installed: pip install 'ferrule[{extra}]' brings it." if extra else ""


def absent(kind: str, name: str, known: Collection[str]) -> str:
    """Say that there is no plugin of that name, and how it can be installed or which of the `known` may be meant."""
    return missing(kind, name) or f"There is no {kind} plugin '{name}'.{nearest(name, known)}"


def missing_beside(kind: str, names: Collection[str]) -> list[str]:
    """Return such a sentence for each plugin of a kind that Ferrule knows and that is not among these names."""
    known = [id.partition(":")[2] for id in EXTRAS if id.startswith(f"{kind}:")]
    return [missing(kind, name) for name in known if name not in names]
