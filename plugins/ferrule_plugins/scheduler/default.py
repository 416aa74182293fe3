"""`default`: the engine's own scheduler, offered as any other would be."""

from __future__ import annotations

from ferrule.engine.scheduler import DefaultScheduler

__all__ = ["DefaultScheduler"]
