"""The bank: adapters by their folders in the host's memory, and in the device's slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
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
from ferrule_plugins.adapter_bank.lora.reading import FolderReads
from ferrule_plugins.adapter_bank.lora.settings import read_settings
from ferrule_plugins.adapter_bank.lora.weights import (
    AdapterData,
    Contents,
    PartWeights,
    Weights,
    float_of,
    lay_out,
    read_tensors,
)

_MOST_INFOS = 1 << 14  # of adapters, each a few bytes: more than a server has names for


class LoraBank(AdapterBank):
    """A bank of LoRA adapters in PEFT's layout.

    Every layer has a `LowRank`, whose groups are the layer's parts in slot 0, those in slot 1, and so on. Files are
    read without `lock`, so that a folder that gives nothing holds up no other; all else happens with it.
    """

    concurrent = True

    def __init__(self, context: BankContext) -> None:
        super().__init__(context)
        self._context = context
        self._limits: Limits | None = None  # once the layers are known
        self._kernels = context.kernels.part(LayerKernels) or LayerKernels()
        self._layers: dict[str, AdaptedLayer] = {}
        self._added: dict[str, AddedRows] = {}  # by layer
        self._rows = RowMaker(1 + context.num_slots, context.max_added, float_of(context.dtype), context.device)
        self._matrices: dict[str, LowRank] = {}
        self._places: dict[str, dict[str, Place]] = {}  # by module, and layer
        self._host: OrderedDict[str, AdapterData] = OrderedDict()  # by adapter's name, the one used last at the end
        self._infos: OrderedDict[str, AdapterInfo] = OrderedDict()  # by adapter's name, the one read last at the end
        self._loaded: dict[int, tuple[Adapter, Weights]] = {}  # by slot
        self._reads = FolderReads()
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
        with short_turns() as pace, self._ready(adapter, pace):
            pass

    def describe(self, adapter: Adapter) -> AdapterInfo:
        return self._infos.get(adapter.name, AdapterInfo())

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        with short_turns() as pace:
            with self.lock:
                self._clear(slot, pace)
            with self._ready(adapter, pace) as data:
                self._loaded[slot] = adapter, data.weights
                scaling = self._context.scaling
                if self.position_scales is not None and scaling is not None and data.factor is not None:
                    self.position_scales[slot] = scaling.own / data.factor
                for (name, part), one in data.weights.items():
                    self._put(slot, name, part, one)
                    pace.rest()
                for name, rows in data.added.rows.items() if data.added.count else ():
                    self.revision += self._rows.put(self._added[name], slot, rows)
                self.num_added[slot] = data.added.count
                for matrices in islice(self._matrices.values(), 1):
                    matrices.ranks[slot].tolist()  # waits until a device has all of it

    @torch.inference_mode()
    def follow_model(self) -> None:
        kept = [data.weights for data in self._host.values()]
        for weights in (*kept, *(weights for _, weights in self._loaded.values())):
            for one in weights.values():
                one.scales = None
        for slot, (adapter, weights) in self._loaded.items():
            with _told(adapter):
                self._follow(weights)
            for (name, part), one in weights.items():
                if one.change is not None:
                    self._put(slot, name, part, one)

    def _follow(self, weights: Weights) -> None:
        """Compute what depends on the model's weights, and is not there."""
        for (name, part), one in weights.items():
            if one.scales is None:
                one.follow(self._layers[name], part)

    def _clear(self, slot: int, pace: Pace) -> None:
        """Leave no adapter in a slot."""
        self._loaded.pop(slot, None)
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

    def _put(self, slot: int, name: str, part: int, weights: PartWeights) -> None:
        matrices, group = self._matrices[name], slot * self._layers[name].parts + part
        start, ranks = 0, [0] * len(matrices.outputs)
        for projection, outputs in enumerate(matrices.outputs):
            if projection in weights.ups:
                down, up, rank_scales = weights.stored(projection, matrices.outputs, self._context.dtype)
                ranks[projection] = len(up)
                if matrices.table:
                    matrices.down[group, :, : len(up)].copy_(down)
                else:
                    matrices.down[group, projection, : len(up)].copy_(down)
                matrices.up[group, : len(up), start : start + outputs].copy_(up)
                matrices.rank_scales[group, projection, : len(up)].copy_(rank_scales)
            start += outputs
        if weights.scales is not None and weights.offsets is not None:
            matrices.scales[group].copy_(weights.scales)
            matrices.offsets[group].copy_(weights.offsets)
            matrices.changed[group] = 1
        matrices.ranks[group].copy_(torch.tensor(ranks, dtype=torch.int32))

    @contextmanager
    def _ready(self, adapter: Adapter, pace: Pace) -> Iterator[AdapterData]:
        """Yield an adapter's data, with the lock. They stay those that were read first under its name. Raises
        RequestError, UnavailableError.
        """
        with self.lock:
            found = self._host.get(adapter.name)
            limits = self._limits = self._limits or self._bounds()
        with _told(adapter):
            read = found or self._reads(Path(adapter.path), partial(self._read, limits), pace)
            with self.lock, torch.inference_mode():
                data = self._host.pop(adapter.name, None)
                data = data or (read if isinstance(read, AdapterData) else lay_out(read, limits, pace))
                self._follow(data.weights)
                self._host[adapter.name], self._infos[adapter.name] = data, self._info(data)
                while len(self._host) > self._context.max_host:
                    self._host.popitem(last=False)
                while len(self._infos) > _MOST_INFOS:
                    self._infos.popitem(last=False)
                yield data

    def _info(self, data: AdapterData) -> AdapterInfo:
        scaling = self._context.scaling
        longest = 0 if scaling is None or data.factor is None else scaling.length(data.factor)
        return AdapterInfo(max_len=longest, num_added=data.added.count)

    def _read(self, limits: Limits, folder: Path, pace: Pace) -> Contents:
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist.")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        settings = read_settings(folder)
        factor = factor_of(settings.context_length, self._context.scaling)
        file = open_adapter(folder)
        contents = Contents(*fit(file.entries, settings, self._find, limits), factor)
        read_tensors(file, contents, limits, pace)
        return contents

    def _bounds(self) -> Limits:
        context = self._context
        vocabulary = Vocabulary.of(list(self._layers.values()), context.max_added, context.no_added)
        return Limits(context.max_rank, context.dtype, context.bias, vocabulary)

    def _find(self, module: str) -> list[Place]:
        return list(self._places.get(self.module_name(bare(module)), {}).values())


@contextmanager
def _told(adapter: Adapter) -> Iterator[None]:
    """Raise RequestError for what is wrong with an adapter's files."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        why = error.message if isinstance(error, CheckpointError) else f"{error.strerror or error}."
        why = why.replace(f"{adapter.path}/", "").replace(adapter.path, "its folder")  # clients may not know where
        raise RequestError(f"The adapter {adapter.title!r:.200} cannot be loaded: {why}", "model") from error
