"""A model's weights in the host's memory while the device's memory is free for others (sleep level 1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostCopy:
    """A copy of tensors' storages in the host's memory; the storages themselves are empty until `restore`.

    Tensors keep their identity: views and tied weights share the same memory again afterwards. A storage that torch's
    allocator did not make, such as that of weights which are in the host's memory anyway, is left as it is.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of `tensors`, each once, and free them."""
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self._copies.append((storage, _bytes(storage).to("cpu", copy=True).untyped_storage()))
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy everything back and drop the copies. After an out-of-memory error it can be called again."""
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes())
            _bytes(storage).copy_(_bytes(copy))
            self._copies.pop()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
