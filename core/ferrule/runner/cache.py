"""The memory of layers. KV cache tensors: one storage per layer position, shared by the groups. States: one per slot,
and snapshots of them.

A block id means one page of every layer of *one* group, and layer j of each group lives in storage j: a block that
leaves one group may serve another. Where the layers' pages differ in size the storage has the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.model import LayerCache, Model, StateSpec
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, CacheGroup, Chunk, StepPlan

Stage = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # from the host to the device
Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # on the device
_NO_LAYERS: Mapping[str, LayerCache] = MappingProxyType({})
ShapeOf = Callable[[LayerCache, int], tuple[int, ...]]  # of a layer's cache with this number of blocks


@dataclass(frozen=True)
class LayerPlace:
    """The place of a layer's cache: its group and its storage."""

    group: int
    storage: int
    spec: LayerCache


@dataclass(frozen=True)
class CacheMap:
    """The assignment of layers to shared storages. `page_elements[j]` is one block's size in storage j.

    `places` are those of the model's layers, `drafts` those of a speculator's own.
    """

    groups: tuple[CacheGroup, ...]
    places: Mapping[str, LayerPlace]
    drafts: Mapping[str, LayerPlace]
    page_elements: tuple[int, ...]
    shape: ShapeOf

    @property
    def page_size(self) -> int:
        """Elements of one block over all storages."""
        return sum(self.page_elements)

    @property
    def paged(self) -> tuple[CacheGroup, ...]:
        """The groups that have block tables."""
        return tuple(group for group in self.groups if group.paged)

    def allocate(self, num_blocks: int, dtype: torch.dtype, zeros: Zeros) -> list[torch.Tensor]:
        """Allocate zeroed storages [num_blocks, page]."""
        return [zeros((num_blocks, size), dtype) for size in self.page_elements]

    def views(self, places: Mapping[str, LayerPlace], storages: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the caches of layers, in the shape that attention wants. Without storages there are none."""
        views = {}
        for name, place in places.items() if storages else ():
            spec, storage = place.spec, storages[place.storage]
            views[name] = _view(storage, self.shape(spec, len(storage)), spec.group.block_size)
        return views


@dataclass(frozen=True)
class StatesBefore:
    """A slot's states before a chunk [start, end) that has guesses."""

    start: int
    end: int
    states: Mapping[str, torch.Tensor]


class StateStore:
    """A model's recurrent states. A slot's are set when it is given to a request, not before.

    Beside those of the slots there are snapshots, which plans number from 1 on.
    """

    def __init__(self, specs: Mapping[str, StateSpec], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._specs = {name: (spec.shape, spec.dtype or dtype) for name, spec in specs.items()}
        self.slots = slots
        self._device = device
        self.tensors: dict[str, torch.Tensor] = {}  # each [slots, *shape]
        self._saved: dict[str, torch.Tensor] = {}  # each [snapshots, *shape]
        self._before: dict[int, StatesBefore] = {}  # by slot, whose last chunk had guesses

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        return [*self.tensors.values(), *self._saved.values()]

    @property
    def request_bytes(self) -> int:
        """Bytes of one request's states, and of a snapshot."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._specs.values())

    @property
    def num_bytes(self) -> int:
        return self.slots * self.request_bytes

    def allocate(self, zeros: Zeros, num_snapshots: int = 0) -> None:
        """Make all states, and as many snapshots."""

        def states(count: int) -> dict[str, torch.Tensor]:
            return {name: zeros((count, *shape), dtype) for name, (shape, dtype) in self._specs.items()}

        self.tensors = states(self.slots)
        self._saved = states(num_snapshots) if num_snapshots else {}

    def release(self) -> None:
        self.tensors, self._saved, self._before = {}, {}, {}

    def begin(self, admits: Sequence[Admit], stage: Stage) -> None:
        """Set the states of admitted requests to zeros, or to those after the cached prefix that was found."""
        if not self.tensors:
            return
        for admit in admits:
            self._before.pop(admit.slot, None)
        cleared = [admit.slot for admit in admits if not admit.restore]
        if cleared:
            (slots,) = stage([torch.tensor(cleared)])
            for tensor in self.tensors.values():
                tensor.index_fill_(0, slots, 0)
        restored = [(admit.slot, admit.restore - 1) for admit in admits if admit.restore]
        if restored:
            slots, snapshots = stage([torch.tensor(each) for each in zip(*restored, strict=True)])
            for name, tensor in self.tensors.items():
                tensor.index_copy_(0, slots, self._saved[name].index_select(0, snapshots))

    def rewind(self, plan: StepPlan) -> StepPlan:
        """Return the plan to compute, in which a chunk begins where the one before did if that had a wrong guess.

        States are put back to there, so the tokens that counted are computed again. Their keys and values are written
        once more: nobody shares these blocks, because there is no snapshot behind them yet.
        """
        if not self.tensors or not (self._before or any(chunk.drafts for chunk in plan.chunks)):
            return plan
        return replace(plan, chunks=tuple([self._rewind(chunk) for chunk in plan.chunks]))

    def _rewind(self, chunk: Chunk) -> Chunk:
        before = self._before.pop(chunk.slot, None)
        if before is not None and chunk.start < before.end:
            for name, state in before.states.items():
                self.tensors[name][chunk.slot].copy_(state)
            chunk = replace(chunk, start=before.start, count=chunk.start + chunk.count - before.start)
        if chunk.drafts:
            states = {name: tensor[chunk.slot].clone() for name, tensor in self.tensors.items()}
            self._before[chunk.slot] = StatesBefore(chunk.start, chunk.start + chunk.count, states)
        return chunk

    def save(self, chunks: Sequence[Chunk], stage: Stage) -> None:
        """Copy the states after those chunks that say where to save them."""
        saved = [(chunk.slot, chunk.save - 1) for chunk in chunks if chunk.save]
        if saved:
            slots, snapshots = stage([torch.tensor(each) for each in zip(*saved, strict=True)])
            for name, tensor in self.tensors.items():
                self._saved[name].index_copy_(0, snapshots, tensor.index_select(0, slots))

    def keep(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Callable[[], None]:
        """Copy the states of the slots `rows`, and return the function that puts them back."""
        slots = torch.from_numpy(rows).to(self._device)
        kept = {name: tensor.index_select(0, slots) for name, tensor in self.tensors.items()}

        def put_back() -> None:
            for name, tensor in self.tensors.items():
                tensor.index_copy_(0, slots, kept[name])

        return put_back


def snapshots_in(room: int, each: int, page_bytes: int) -> int:
    """Return how many states of `each` bytes to keep for cached prefixes, in the `room` that running requests leave.

    They get a quarter of it beside blocks of `page_bytes`, and are not more than blocks; all of it where there are
    none.
    """
    if not each:
        return 0
    return min(room // 4 // each, room // (each + page_bytes)) if page_bytes else room // each


def cache_of(
    model: Model, attention: AttentionBackend, limits: RunnerLimits, drafts: Mapping[str, LayerCache] = _NO_LAYERS
) -> tuple[CacheMap, StateStore]:
    """Return what a model's layers keep, and a speculator's own (`drafts`); nothing of it is allocated yet."""
    states, shape_of = model.state_specs(), _shape_by(attention)
    places, drafted, groups, pages = _map_layers(model.cache_specs(), drafts, shape_of)
    if states:
        size = groups[0].block_size if groups else limits.block_size  # the engine wants the same of all groups
        groups.append(CacheGroup("recurrent", size, num_layers=len(states)))
    layers = CacheMap(tuple(groups), places, drafted, tuple(pages), shape_of)
    return layers, StateStore(states, limits.slots, limits.dtype, limits.device)


Places = dict[str, LayerPlace]


def _map_layers(
    specs: Mapping[str, LayerCache], drafts: Mapping[str, LayerCache], shape_of: ShapeOf
) -> tuple[Places, Places, list[CacheGroup], list[int]]:
    """Group the layers of a model and of a speculator, which may have the same names, by the properties that the engine
    must know.

    Returns the places of both, the groups, and the sizes of pages. Equal groups are one: its blocks have the entries of
    both.
    """
    places: tuple[Places, Places] = {}, {}
    groups: dict[tuple[str, int, int], int] = {}
    described: list[CacheGroup] = []
    pages: list[int] = []
    for found, layers in zip(places, (specs, drafts), strict=True):
        for name, spec in layers.items():
            number = groups.setdefault((spec.group.kind, spec.group.block_size, spec.group.window), len(groups))
            if number == len(described):
                described.append(replace(spec.group, num_layers=0))
            storage = described[number].num_layers
            described[number] = replace(described[number], num_layers=storage + 1)
            found[name] = LayerPlace(number, storage, spec)
            if storage == len(pages):
                pages.append(0)
            pages[storage] = max(pages[storage], math.prod(shape_of(spec, 1)))
    return *places, described, pages


def _shape_by(attention: AttentionBackend) -> ShapeOf:
    """Return the function for a layer's cache shape.

    The attention backend decides the shape, unless the model reads the cache itself: then tokens come first.
    """

    def shape(spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        if spec.attended:
            return attention.cache_shape(spec, num_blocks)
        return (num_blocks, spec.group.block_size, spec.num_kv_heads * spec.head_dim)

    return shape


def _view(storage: torch.Tensor, shape: tuple[int, ...], block_size: int) -> torch.Tensor:
    """Return a layer's part of storage [num_blocks, page].

    Where its entries are smaller than the page's, and a page is tokens first, the rest lies after each token's entry:
    so [num_blocks, block_size, …] flattens to [slots, …] without a copy.
    """
    page = math.prod(shape[1:])
    if shape[1] != block_size:
        return storage[:, :page].view(shape)
    return storage.view(shape[0], block_size, -1)[:, :, : page // block_size].view(shape)
