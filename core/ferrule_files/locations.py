"""Where the tensors of torch files are put: `--pt-load-map-location`.

Each storage of such a file states the location that it was saved on, as "cpu" or "cuda:1". torch puts what no mapping
names there again, so a file from a GPU cannot be read on a machine without one. Here it stays in the host's memory,
from where every tensor is copied to the device that the model is on. A device that is named gets one tensor at a time,
which is converted to the parameter's type there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferrule.errors import ConfigError

if TYPE_CHECKING:
    import torch

OPTION = "pt_load_map_location"  # of `WeightSource.tensors`


class Locations:
    """Devices by the locations that files state, "" for every other location.

    Raises ConfigError for a device that this machine does not have.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._devices = {location: _device(name) for location, name in options.get(OPTION, {}).items()}
        self._stated: dict[int, str] = {}  # address of a storage → location

    @property
    def needed(self) -> bool:
        """Whether a tensor may be put on another device than the CPU."""
        import torch

        host = torch.empty(0)
        return any(host.to(device) is not host for device in self._devices.values())

    def note(self, storage: Any, location: str) -> Any:
        """Keep what the file says of a storage, and leave the storage in the host's memory, as a `map_location`."""
        self._stated[storage.data_ptr()] = location
        return storage

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on its device; the same tensor if that is the CPU."""
        location = self._stated.get(tensor.untyped_storage().data_ptr(), "cpu")
        device = self._devices.get(location, self._devices.get(""))
        return tensor if device is None else tensor.to(device)


def _device(name: str) -> torch.device:
    import torch

    try:
        made = torch.empty(0, device=name)
    except (AssertionError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"--pt-load-map-location: this machine has no device {name!r}.",
            "Leave the option out: whatever device a file was saved on, its tensors go to the model's device.",
        ) from error
    if made.is_meta:
        raise ConfigError("--pt-load-map-location: the device 'meta' keeps no weights.", "Leave the option out.")
    return made.device
