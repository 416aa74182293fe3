"""Devices that plugins are asked about."""

from __future__ import annotations

from collections.abc import Iterable

from ferrule.interfaces.platform import DeviceCaps


def fake_caps(platform: str = "cpu", features: Iterable[str] = ()) -> DeviceCaps:
    """Return a device of a platform, with the features that every device of it has."""
    common = {"cpu": {"host_memory"}, "cuda": {"cuda"}}.get(platform, set[str]())
    return DeviceCaps(platform, "a device of the kit", 1 << 33, frozenset(features) | common)
