"""What a model's parts hold: every tensor, whatever it is kept in."""

from __future__ import annotations

import gc
from collections import deque

import torch


def stored_by(model: object, device: torch.device) -> list[torch.Tensor]:
    """Every tensor on the kind of `device` that a model's parts hold, whatever they keep it in: schemes, lists.

    The model's parts come in their order.
    """
    parts = model.modules() if isinstance(model, torch.nn.Module) else (model,)
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting: deque[object] = deque(part.__dict__ for part in parts)
    while waiting:
        holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if isinstance(holder, torch.Tensor):
            if holder.device.type == device.type and holder.layout == torch.strided:
                found.append(holder)
        elif isinstance(holder, dict):
            waiting.extend(holder.values())
        elif isinstance(holder, (list, tuple, set, frozenset)):
            waiting.extend(holder)
        elif _may_hold(holder):
            waiting.extend(item for item in gc.get_referents(holder) if not isinstance(item, type))
    return found


def _may_hold(holder: object) -> bool:
    """Instances of plugins' and of our own classes; not modules of Python, functions, or torch's machinery."""
    home = type(holder).__module__.partition(".")[0]
    return home not in ("builtins", "torch", "types", "functools", "collections") and not isinstance(
        holder, (type, torch.nn.Module)
    )
