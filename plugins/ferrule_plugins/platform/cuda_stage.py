"""Copies between host and CUDA device that do not block: in each direction one pinned buffer and one copy per step.

A copy from pageable memory waits for all work that was launched before it, so steps would not overlap. Pinned buffers
come from torch's allocator: it gives a buffer out again only when the copies that read it have ended, so that any
number of steps may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ferrule.interfaces.platform import Copies, Transfers

ALIGNMENT = 64  # bytes between which tensors begin: whole vectors for every kernel, whole sectors for the device


class Event(Protocol):
    """A mark in the stream of launches, as `torch.cuda.Event` is one."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


@dataclass(frozen=True)
class Layout:
    """The places of tensors in one buffer of `size` bytes."""

    places: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]  # offset in bytes, type, shape
    size: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[torch.dtype, Sequence[int]]]) -> Layout:
        """Lay out one tensor after the other, each at a multiple of ALIGNMENT."""
        places, end = [], 0
        for dtype, shape in tensors:
            places.append((end, dtype, tuple(shape)))
            end += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), end)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in `buffer` [at least size] uint8."""
        return [
            buffer[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for offset, dtype, shape in self.places
        ]

    def write(self, buffer: torch.Tensor, inputs: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Copy tensors of the host to their places in `buffer`, on the host too; a number fills the remaining rows.

        NumPy does it: a step would need a hundred of torch's views, each of which takes microseconds.
        """
        memory = buffer.numpy()
        for (offset, _, shape), (values, fill) in zip(self.places, inputs, strict=True):
            given = _array(values)
            place: np.ndarray[Any, Any] = np.ndarray(shape, given.dtype, memory, offset)
            if place.shape == given.shape:
                place[...] = given
            else:
                place[: len(given)], place[len(given) :] = given, fill


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array over the same memory; bfloat16, which NumPy does not have, as integers."""
    array: np.ndarray[Any, Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


class PinnedCopies(Copies):
    """Tensors on their way to the host, which have arrived once the device has passed `event`."""

    def __init__(self, tensors: list[torch.Tensor], event: Event) -> None:
        super().__init__(tensors)
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        return super().wait()


class PinnedTransfers(Transfers):
    """Transfers of a CUDA device. `pinned` and `event` are replaced where there is none."""

    def __init__(self, pinned: bool = True, event: Callable[[], Event] = _cuda_event) -> None:
        self._pinned = pinned
        self._event = event

    def buffer(self, size: int) -> torch.Tensor:
        """Allocate [size] uint8 on the host, not initialised, from which copies need not wait."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def stage(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        layout = Layout.of([(tensor.dtype, tensor.shape) for tensor in tensors])
        host = self.buffer(layout.size)
        layout.write(host, ((tensor, 0) for tensor in tensors))
        return layout.views(host.to(device, non_blocking=True))

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Copies:
        layout = Layout.of([(tensor.dtype, tensor.shape) for tensor in tensors])
        copies = layout.views(self.buffer(layout.size))
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = self._event()
        event.record()
        return PinnedCopies(copies, event)
