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
from ferrule_plugins.adapter_bank.lora.files import FILES, open_adapter
from ferrule_plugins.adapter_bank.lora.fit import Limits, Place, bare, fit
from ferrule_plugins.adapter_bank.lora.settings import CONFIG, read_settings
from ferrule_plugins.adapter_bank.lora.weights import PartWeights, Weights, pause, read_weights

Stamp = tuple[tuple[str, int, int], ...]  # of each file: name, bytes, nanoseconds of its last change


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
        self._host: OrderedDict[str, tuple[Stamp, Weights]] = OrderedDict()  # by path, the one used last at the end
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
        self._weights(adapter)

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        self._clear(slot)
        weights = self._weights(adapter)
        for (name, part), one in weights.items():
            self._put(self._matrices[name], slot * self._layers[name].parts + part, one)
            pause()

    def _clear(self, slot: int) -> None:
        """Leave no adapter in a slot."""
        for name, matrices in self._matrices.items():
            parts = self._layers[name].parts
            groups = slice(slot * parts, (slot + 1) * parts)
            matrices.ranks[groups], matrices.changed[groups] = 0, 0

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
    def _weights(self, adapter: Adapter) -> Weights:
        """Return an adapter's weights, read anew if its files have changed. Raises RequestError."""
        known = self._host.get(adapter.path)
        try:
            stamp = _stamp(Path(adapter.path))
            if known is None or known[0] != stamp:
                self._host.pop(adapter.path, None)
                known = stamp, self._read(Path(adapter.path))
        except (CheckpointError, OSError) as error:
            if known is None or isinstance(error, CheckpointError):  # what was read before outlives its files
                said = _said(error).replace(f"{adapter.path}/", "")  # clients may know its name, not its place
                raise RequestError(f"The adapter {adapter.title!r:.200} cannot be loaded: {said}", "model") from error
        self._host[adapter.path] = known
        self._host.move_to_end(adapter.path)
        while len(self._host) > self._context.max_host:
            self._host.popitem(last=False)
        return known[1]

    def _read(self, folder: Path) -> Weights:
        settings = read_settings(folder)
        file = open_adapter(folder)
        modules = fit(file.entries, settings, self._find, self._limits)
        return read_weights(file, modules, self._limits)

    def _find(self, module: str) -> list[Place]:
        return list(self._places.get(self.module_name(bare(module)), {}).values())


def _stamp(folder: Path) -> Stamp:
    """Return what changes when an adapter's files do. Raises CheckpointError, and OSError where they are gone."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.")
    status = ((name, (folder / name).stat()) for name in (CONFIG, *FILES) if (folder / name).exists())
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in status)


def _said(error: CheckpointError | OSError) -> str:
    return error.message if isinstance(error, CheckpointError) else f"{error.strerror or error}."
