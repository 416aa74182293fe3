"""A bank of made-up adapters: two vectors for each layer, drawn by the adapter's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import torch

from ferrule.errors import RequestError
from ferrule.interfaces.adapters import AdapterBank
from ferrule.types import Adapter


@dataclass(frozen=True)
class Part:
    """A layer's vectors in every slot: [slots, in] and [slots, out]. Those of slot 0 are zeros."""

    inputs: torch.Tensor
    outputs: torch.Tensor


def vectors(adapter: str, layer: str, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an adapter's vectors for a layer: its weights are the outer product [out, in] of the second and the
    first.
    """
    draw = torch.Generator().manual_seed(crc32(f"{adapter} {layer}".encode()))
    inputs = torch.randn(in_features, generator=draw) * in_features**-0.5
    return inputs, torch.randn(out_features, generator=draw) * 0.5


class FakeBank(AdapterBank):
    """Adapters of rank one for every layer, on the CPU. One whose name begins with "bad" does not fit any model."""

    def __init__(self, num_slots: int = 2) -> None:
        self.num_slots = num_slots
        self.token_slots = torch.empty(0, dtype=torch.int64)
        self.parts: dict[str, Part] = {}

    def layer(
        self, name: str, in_features: int, out_features: int, projections: tuple[str, ...]
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        slots = 1 + self.num_slots
        part = self.parts[name] = Part(torch.zeros(slots, in_features), torch.zeros(slots, out_features))

        def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            inputs, outputs = (each.index_select(0, self.token_slots) for each in (part.inputs, part.outputs))
            return y.add_(((x * inputs).sum(1, keepdim=True) * outputs).to(y.dtype))

        return add

    def load(self, slot: int, adapter: Adapter) -> None:
        if adapter.name.startswith("bad"):
            raise RequestError(f"The adapter {adapter.name} does not fit the model.", "model")
        for name, part in self.parts.items():
            inputs, outputs = vectors(adapter.name, name, part.inputs.shape[1], part.outputs.shape[1])
            part.inputs[slot], part.outputs[slot] = inputs, outputs
