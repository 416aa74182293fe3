"""Weights that wait in the host's memory while their device's memory is somebody else's (sleep level 1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Parked:
    """Copies of storages in the host's memory; the storages themselves hold nothing until `wake`.

    Tensors keep their identity: whoever holds a weight, a view of it or a tied one, holds it again afterwards. What
    is not found stays on the device, and is right there too; so does what is not the allocator's, as weights that are
    the host's in any case.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move out what `tensors` store; those that share memory are moved once."""
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self._copies.append((storage, _bytes(storage).to("cpu", copy=True).untyped_storage()))
        for storage, _ in self._copies:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes() for _, copy in self._copies)

    def wake(self) -> None:
        """Move everything back, and forget the copies. After an error for want of memory it can be called again."""
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes())
            _bytes(storage).copy_(_bytes(copy))
            self._copies.pop()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
