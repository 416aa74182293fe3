"""What a request's tools and tool choice demand of the calls: the definitions of the core."""

from __future__ import annotations

from ferrule.structured_outputs.calls import EnforcedFunction, enforced

__all__ = ["EnforcedFunction", "enforced"]
