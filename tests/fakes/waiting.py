"""What the host of a device may not do within a step."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_ASKING = ("_local_scalar_dense", "bincount", "nonzero", "equal", "masked_select", "_unique2")


class Waits(TorchDispatchMode):
    """A mode that raises on operations after which the host knows a number of the device's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _ASKING:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
