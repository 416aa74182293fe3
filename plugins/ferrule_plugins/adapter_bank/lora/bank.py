"""The bank: adapters by their folders in the host's memory, and in the device's slots."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path

import torch

from ferrule.errors import CheckpointError, RequestError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, BankContext
from ferrule.types import Adapter
from ferrule_kernels.low_rank import LowRank, add
from ferrule_nn import LayerKernels
from ferrule_plugins.adapter_bank.lora.files import open_adapter
from ferrule_plugins.adapter_bank.lora.fit import Limits, Place, bare, fit
from ferrule_plugins.adapter_bank.lora.pace import Pace, short_turns
from ferrule_plugins.adapter_bank.lora.settings import read_settings
from ferrule_plugins.adapter_bank.lora.weights import PartWeights, Weights, read_weights


class LoraBank(AdapterBank):
    """A bank of LoRA adapters in PEFT's layout.

    Every layer has a `LowRank`, whose groups are the layer's parts in slot 0, those in slot 1, and so on.
    """

    def __init__(self, context: BankContext) -> None:
        super().__init__(context)
        self._context = context
        self._limits = Limits(context.max_rank, context.dtype, context.bias)
        self._kernels = context.kernels.part(LayerKernels) or LayerKernels()
        self._layers: dict[str, AdaptedLayer] = {}
        self._matrices: dict[str, LowRank] = {}
        self._places: dict[str, dict[str, Place]] = {}  # by module, and layer
        self._host: OrderedDict[str, Weights] = OrderedDict()  # by adapter's name, the one used last at the end
        self.token_slots = self.row_slots = torch.empty(0, dtype=torch.int64)

    def layer(self, layer: AdaptedLayer) -> Add | None:
        context = self._context
        self._layers[layer.name] = layer
        for module, (part, projection) in layer.modules.items():
            self._places.setdefault(module, {})[layer.name] = Place(layer, part, projection)
        if layer.stacked is not None:
            self._places.setdefault(layer.stacked.module, {})[layer.name] = Place(layer, stacked=layer.stacked)
        matrices = self._matrices.get(layer.name)
        if matrices is None:
            matrices = self._matrices[layer.name] = LowRank(
                (1 + self.num_slots) * layer.parts,
                context.max_rank,
                layer.own_inputs,
                layer.own_outputs,
                context.dtype,
                context.device,
                layer.table,
            )
        kernel = None if self._kernels.low_rank is None else self._kernels.low_rank(matrices)
        return kernel or partial(add, matrices)

    def read(self, adapter: Adapter) -> None:
        with short_turns() as pace:
            self._weights(adapter, pace)

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        with short_turns() as pace:
            self._clear(slot, pace)
            weights = self._weights(adapter, pace)
            for (name, part), one in weights.items():
                matrices = self._matrices[name]
                self._put(matrices, slot * self._layers[name].parts + part, one)
                pace.rest()
            if weights:
                matrices.ranks[slot].tolist()  # waits until a device has all of it

    def _clear(self, slot: int, pace: Pace) -> None:
        """Leave no adapter in a slot."""
        for name, matrices in self._matrices.items():
            parts = self._layers[name].parts
            groups = slice(slot * parts, (slot + 1) * parts)
            matrices.ranks[groups], matrices.changed[groups] = 0, 0
            pace.rest()

    def _put(self, matrices: LowRank, group: int, weights: PartWeights) -> None:
        start, ranks = 0, [0] * len(matrices.outputs)
        for projection, outputs in enumerate(matrices.outputs):
            up = weights.ups.get(projection)
            if up is not None:
                ranks[projection] = len(up)
                down = weights.downs[projection]
                if matrices.table:
                    matrices.down[group, :, : len(up)].copy_(down)
                else:
                    matrices.down[group, projection, : len(up)].copy_(down)
                matrices.up[group, : len(up), start : start + outputs].copy_(up)
                matrices.rank_scales[group, projection, : len(up)].copy_(weights.rank_scales[projection])
            start += outputs
        if weights.scales is not None and weights.offsets is not None:
            matrices.scales[group].copy_(weights.scales)
            matrices.offsets[group].copy_(weights.offsets)
            matrices.changed[group] = 1
        matrices.ranks[group].copy_(torch.tensor(ranks, dtype=torch.int32))

    @torch.inference_mode()
    def _weights(self, adapter: Adapter, pace: Pace) -> Weights:
        """Return an adapter's weights, which stay those that were read first under its name. Raises RequestError."""
        weights = self._host.pop(adapter.name, None)
        try:
            weights = self._read(Path(adapter.path), pace) if weights is None else weights
        except (CheckpointError, OSError) as error:
            why = error.message if isinstance(error, CheckpointError) else f"{error.strerror or error}."
            why = why.replace(f"{adapter.path}/", "").replace(adapter.path, "its folder")  # clients may not know where
            raise RequestError(f"The adapter {adapter.title!r:.200} cannot be loaded: {why}", "model") from error
        self._host[adapter.name] = weights
        while len(self._host) > self._context.max_host:
            self._host.popitem(last=False)
        return weights

    def _read(self, folder: Path, pace: Pace) -> Weights:
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist.")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        settings = read_settings(folder)
        file = open_adapter(folder)
        modules = fit(file.entries, settings, self._find, self._limits)
        return read_weights(file, modules, self._limits, pace)

    def _find(self, module: str) -> list[Place]:
        return list(self._places.get(self.module_name(bare(module)), {}).values())
