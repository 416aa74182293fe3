"""The bank: adapters by their folders in the host's memory, and in the device's slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ferrule.errors import CheckpointError, RequestError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, BankContext
from ferrule.types import Adapter
from ferrule_kernels.low_rank import LowRank, add
from ferrule_nn import LayerKernels
from ferrule_plugins.adapter_bank.lora.files import open_adapter
from ferrule_plugins.adapter_bank.lora.fit import Fitted, Limits, Place, bare, fit
from ferrule_plugins.adapter_bank.lora.pace import Pace, short_turns
from ferrule_plugins.adapter_bank.lora.reading import FolderReads
from ferrule_plugins.adapter_bank.lora.settings import read_settings
from ferrule_plugins.adapter_bank.lora.weights import PartWeights, Tensors, Weights, lay_out, read_tensors


class LoraBank(AdapterBank):
    """A bank of LoRA adapters in PEFT's layout.

    Every layer has a `LowRank`, whose groups are the layer's parts in slot 0, those in slot 1, and so on. Files are
    read without `lock`, so that a folder that gives nothing holds up no other; all else happens with it.
    """

    concurrent = True

    def __init__(self, context: BankContext) -> None:
        super().__init__(context)
        self._context = context
        self._limits = Limits(context.max_rank, context.dtype, context.bias)
        self._kernels = context.kernels.part(LayerKernels) or LayerKernels()
        self._layers: dict[str, AdaptedLayer] = {}
        self._matrices: dict[str, LowRank] = {}
        self._places: dict[str, dict[str, Place]] = {}  # by module, and layer
        self._host: OrderedDict[str, Weights] = OrderedDict()  # by adapter's name, the one used last at the end
        self._loaded: dict[int, tuple[Adapter, Weights]] = {}  # by slot
        self._reads = FolderReads()
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
        with short_turns() as pace, self._ready(adapter, pace):
            pass

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        with short_turns() as pace:
            with self.lock:
                self._clear(slot, pace)
            with self._ready(adapter, pace) as weights:
                self._loaded[slot] = adapter, weights
                for (name, part), one in weights.items():
                    self._put(slot, name, part, one)
                    pace.rest()
                if weights:
                    self._matrices[name].ranks[slot].tolist()  # waits until a device has all of it

    @torch.inference_mode()
    def follow_model(self) -> None:
        for weights in (*self._host.values(), *(weights for _, weights in self._loaded.values())):
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
                up = weights.scaled(projection, matrices.outputs)
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

    @contextmanager
    def _ready(self, adapter: Adapter, pace: Pace) -> Iterator[Weights]:
        """Yield an adapter's weights, with the lock. They stay those that were read first under its name. Raises
        RequestError, UnavailableError.
        """
        with self.lock:
            found = self._host.get(adapter.name)
        with _told(adapter):
            read = None if found is not None else self._reads(Path(adapter.path), self._read, pace)
            with self.lock, torch.inference_mode():
                weights = self._host.pop(adapter.name, found)
                weights = lay_out(*read, self._limits, pace) if weights is None and read is not None else weights or {}
                self._follow(weights)
                self._host[adapter.name] = weights
                while len(self._host) > self._context.max_host:
                    self._host.popitem(last=False)
                yield weights

    def _read(self, folder: Path, pace: Pace) -> tuple[Tensors, dict[str, Fitted]]:
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist.")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        settings = read_settings(folder)
        file = open_adapter(folder)
        modules = fit(file.entries, settings, self._find, self._limits)
        return read_tensors(file, self._limits, pace), modules

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
