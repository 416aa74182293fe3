"""A bank of made-up adapters: two vectors for each layer, drawn by the adapter's name."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch

from ferrule.errors import RequestError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, BankContext
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
    """Adapters of rank one for single linear layers, on the CPU, but for the head.

    One whose name begins with "bad" does not fit any model.
    """

    def __init__(self, num_slots: int = 2) -> None:
        device = torch.device("cpu")
        super().__init__(
            BankContext(num_slots=num_slots, max_rank=1, max_host=num_slots, dtype=torch.float32, device=device)
        )
        self.token_slots = self.row_slots = torch.empty(0, dtype=torch.int64)
        self.parts: dict[str, Part] = {}

    def layer(self, layer: AdaptedLayer) -> Add | None:
        if layer.table or layer.parts > 1 or layer.name == "lm_head":
            return None
        slots, outputs = 1 + self.num_slots, sum(layer.own_outputs)
        part = self.parts[layer.name] = Part(torch.zeros(slots, layer.own_inputs), torch.zeros(slots, outputs))

        def add(x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            inputs, outputs = (each.index_select(0, slots) for each in (part.inputs, part.outputs))
            return y.add_(((x * inputs).sum(1, keepdim=True) * outputs).to(y.dtype))

        return add

    def read(self, adapter: Adapter) -> None:
        if adapter.name.startswith("bad"):
            raise RequestError(f"The adapter {adapter.name} does not fit the model.", "model")

    def load(self, slot: int, adapter: Adapter) -> None:
        self.read(adapter)
        for name, part in self.parts.items():
            inputs, outputs = vectors(adapter.name, name, part.inputs.shape[1], part.outputs.shape[1])
            part.inputs[slot], part.outputs[slot] = inputs, outputs
