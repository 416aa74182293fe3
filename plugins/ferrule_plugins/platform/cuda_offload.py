"""Weights that stay in host memory and that the GPU reads over the bus in each step (`--cpu-offload-gb`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ferrule.assembly.memory import device_tensors
from ferrule.interfaces.model import Model
from ferrule.log import Log
from ferrule_plugins.platform.cuda_memory import gib

_log = Log("platform")

_LEAST = 2**20  # bytes: what is smaller stays on the device
_EVERY = 256 * 2**20  # bytes of weights that come between two looks at the model


class HostWeights:
    """A mover of stored weights to the host while others are still loaded, so that the device never holds all of them.

    At most `limit` bytes are moved. A moved tensor keeps its identity, its shape and its device; only its memory is
    elsewhere, and kernels read it over the bus. Nothing is copied in a step, so steps are recorded like any others.
    What a layer packs anew is on the device again, and is moved in its turn.
    """

    def __init__(self, limit: int, map_host: Callable[[int], torch.Tensor], device: torch.device) -> None:
        """Keep the limit and `map_host`, which makes so many bytes of host memory, as a uint8 tensor of `device`."""
        self._limit = limit
        self._map_host = map_host
        self._device = device

    def loading(self, model: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass `weights` on, and move the tensors that they have filled."""
        came = 0
        for name, tensor in weights:
            yield name, tensor
            came += tensor.nbytes
            if came >= _EVERY:
                self.move(model)
                came = 0
        _log.info("weights that the host keeps", size=gib(self.move(model)), limit=gib(self._limit))

    @torch.no_grad()
    def move(self, model: Model) -> int:
        """Move stored tensors until the limit is reached. Returns the bytes that are with the host then."""
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in device_tensors(model, self._device):
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        moved = sum(_storage(tensors).nbytes() for tensors in found.values() if not _storage(tensors).resizable())
        for tensors in found.values():
            size = _storage(tensors).nbytes()
            if _storage(tensors).resizable() and size >= _LEAST and moved + size <= self._limit:
                self._replace(tensors)
                moved += size
        return moved

    def _replace(self, tensors: list[torch.Tensor]) -> None:
        """Give tensors that share a storage another one with the same bytes, which no allocator can resize."""
        before = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(_storage(tensors))
        after = self._map_host(before.numel()).copy_(before).untyped_storage()
        for tensor in tensors:
            tensor.set_(after, tensor.storage_offset(), tensor.size(), tensor.stride())


def _storage(tensors: list[torch.Tensor]) -> torch.UntypedStorage:
    return tensors[0].untyped_storage()
