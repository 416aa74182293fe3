"""Adapters that rescale what layers give: a vector for each layer, by the layer's name in the model's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ferrule.errors import RequestError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, BankContext
from ferrule.types import Adapter

FILE = "vectors.safetensors"


def write(folder: Path, modules: Any, seed: int) -> None:
    """Write an adapter for the conformance kit."""
    draw = torch.Generator().manual_seed(seed)
    save_file({name: 0.5 + torch.rand(outputs, generator=draw) for name, _, outputs in modules}, folder / FILE)


class ExampleBank(AdapterBank):
    """A vector of factors in every slot for each linear layer that is one projection; those of slot 0 are ones."""

    conformance = {"write": write}

    def __init__(self, context: BankContext) -> None:
        super().__init__(context)
        self._device = context.device
        self._factors: dict[str, torch.Tensor] = {}  # by a layer's name, [slots, out]
        self._names: dict[str, str] = {}  # of layers, by their modules

    def layer(self, layer: AdaptedLayer) -> Add | None:
        if layer.table or layer.parts > 1 or len(layer.out_features) > 1:
            return None
        (outputs,) = layer.own_outputs
        if layer.name not in self._factors:
            self._factors[layer.name] = torch.ones(1 + self.num_slots, outputs, device=self._device)
        self._names |= dict.fromkeys(layer.modules, layer.name)
        factors = self._factors[layer.name]

        def add(x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return y.mul_(factors.index_select(0, slots).to(y.dtype))

        return add

    def read(self, adapter: Adapter) -> None:
        self._vectors(adapter)

    def load(self, slot: int, adapter: Adapter) -> None:
        for factors in self._factors.values():
            factors[slot] = 1.0
        vectors = self._vectors(adapter)
        for name, vector in vectors.items():
            self._factors[name][slot] = vector

    def _vectors(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """Read an adapter's vectors, by the layers' names. Raises RequestError for one that does not fit."""
        try:
            given = load_file(Path(adapter.path) / FILE)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"The adapter {adapter.name!r} cannot be read: {error}", "model") from error
        found: dict[str, torch.Tensor] = {}
        for module, vector in given.items():
            name = self._names.get(self.module_name(module))
            if name is None or vector.shape != self._factors[name].shape[1:]:
                raise RequestError(f"The adapter {adapter.name!r} does not fit the model: {module!r:.100}.", "model")
            found[name] = vector
        return found
