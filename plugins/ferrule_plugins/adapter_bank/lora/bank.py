"""The bank: adapters by their folders in the host's memory, and in the device's slots."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path

import torch

from ferrule.errors import CheckpointError, RequestError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, AddedRows, BankContext
from ferrule.types import Adapter, AdapterInfo
from ferrule_kernels.low_rank import LowRank, add
from ferrule_nn import LayerKernels
from ferrule_plugins.adapter_bank.lora.added import RowMaker, Vocabulary
from ferrule_plugins.adapter_bank.lora.files import open_adapter
from ferrule_plugins.adapter_bank.lora.fit import Limits, Place, bare, fit
from ferrule_plugins.adapter_bank.lora.lengths import factor_of
from ferrule_plugins.adapter_bank.lora.pace import Pace, short_turns
from ferrule_plugins.adapter_bank.lora.settings import read_settings
from ferrule_plugins.adapter_bank.lora.weights import AdapterData, PartWeights, read_weights

_MOST_INFOS = 1 << 14  # of adapters, each a few bytes: more than a server has names for


class LoraBank(AdapterBank):
    """A bank of LoRA adapters in PEFT's layout.

    Every layer has a `LowRank`, whose groups are the layer's parts in slot 0, those in slot 1, and so on.
    """

    def __init__(self, context: BankContext) -> None:
        super().__init__(context)
        self._context = context
        self._limits: Limits | None = None  # once the layers are known
        self._kernels = context.kernels.part(LayerKernels) or LayerKernels()
        self._layers: dict[str, AdaptedLayer] = {}
        self._added: dict[str, AddedRows] = {}  # by layer
        self._rows = RowMaker(1 + context.num_slots, context.max_added, context.dtype, context.device)
        self._matrices: dict[str, LowRank] = {}
        self._places: dict[str, dict[str, Place]] = {}  # by module, and layer
        self._host: OrderedDict[str, AdapterData] = OrderedDict()  # by adapter's name, the one used last at the end
        self._infos: OrderedDict[str, AdapterInfo] = OrderedDict()  # by adapter's name, the one read last at the end
        scaling = context.scaling
        if scaling is not None and scaling.factors:
            self.position_scales = torch.ones(1 + context.num_slots, device=context.device)
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

    def added(self, layer: AdaptedLayer) -> AddedRows | None:
        if not self._context.max_added:
            return None
        size = layer.in_features if layer.table else sum(layer.out_features.values())
        return self._added.setdefault(layer.name, AddedRows(size))

    def read(self, adapter: Adapter) -> None:
        with short_turns() as pace:
            self._data(adapter, pace)

    def describe(self, adapter: Adapter) -> AdapterInfo:
        return self._infos.get(adapter.name, AdapterInfo())

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        with short_turns() as pace:
            self._clear(slot, pace)
            data = self._data(adapter, pace)
            weights, scaling = data.weights, self._context.scaling
            if self.position_scales is not None and scaling is not None and data.factor is not None:
                self.position_scales[slot] = scaling.own / data.factor
            for (name, part), one in weights.items():
                matrices = self._matrices[name]
                self._put(matrices, slot * self._layers[name].parts + part, one)
                pace.rest()
            for name, rows in data.added.rows.items() if data.added.count else ():
                self.revision += self._rows.put(self._added[name], slot, rows)
            self.num_added[slot] = data.added.count
            for matrices in self._matrices.values():
                matrices.ranks[slot].tolist()  # waits until a device has all of it
                break

    def _clear(self, slot: int, pace: Pace) -> None:
        """Leave no adapter in a slot."""
        if self.position_scales is not None:
            self.position_scales[slot] = 1.0
        self.num_added[slot] = 0
        for rows in self._added.values():
            self._rows.clear(rows, slot)
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
            start += outputs
        if weights.scales is not None and weights.offsets is not None:
            matrices.scales[group].copy_(weights.scales)
            matrices.offsets[group].copy_(weights.offsets)
            matrices.changed[group] = 1
        matrices.ranks[group].copy_(torch.tensor(ranks, dtype=torch.int32))

    @torch.inference_mode()
    def _data(self, adapter: Adapter, pace: Pace) -> AdapterData:
        """Return an adapter's data, which stay those that were read first under its name. Raises RequestError."""
        data = self._host.pop(adapter.name, None)
        try:
            data = self._read(Path(adapter.path), pace) if data is None else data
        except (CheckpointError, OSError) as error:
            why = error.message if isinstance(error, CheckpointError) else f"{error.strerror or error}."
            why = why.replace(f"{adapter.path}/", "").replace(adapter.path, "its folder")  # clients may not know where
            raise RequestError(f"The adapter {adapter.title!r:.200} cannot be loaded: {why}", "model") from error
        self._host[adapter.name], self._infos[adapter.name] = data, self._info(data)
        while len(self._host) > self._context.max_host:
            self._host.popitem(last=False)
        while len(self._infos) > _MOST_INFOS:
            self._infos.popitem(last=False)
        return data

    def _info(self, data: AdapterData) -> AdapterInfo:
        scaling = self._context.scaling
        longest = 0 if scaling is None or data.factor is None else scaling.length(data.factor)
        return AdapterInfo(max_len=longest, num_added=data.added.count)

    def _read(self, folder: Path, pace: Pace) -> AdapterData:
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist.")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        settings = read_settings(folder)
        factor = factor_of(settings.context_length, self._context.scaling)
        file = open_adapter(folder)
        limits = self._limits = self._limits or self._bounds()
        modules, added = fit(file.entries, settings, self._find, limits)
        return AdapterData(read_weights(file, modules, added, limits, pace), added, factor)

    def _bounds(self) -> Limits:
        context = self._context
        vocabulary = Vocabulary.of(list(self._layers.values()), context.max_added, context.no_added)
        return Limits(context.max_rank, context.dtype, context.bias, vocabulary)

    def _find(self, module: str) -> list[Place]:
        return list(self._places.get(self.module_name(bare(module)), {}).values())
