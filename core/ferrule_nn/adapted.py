"""Linear layers as a bank of adapters sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrule.errors import AsleepError
from ferrule.interfaces.adapters import AdaptedLayer, AdapterBank, Add, AddedRows, Stacked
from ferrule_nn.division import ALL, INPUTS, OUTPUTS, in_order

TokenAdd = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rows = Callable[[torch.Tensor], torch.Tensor]  # of ids
_PIECE = 64  # rows or columns of weights that are looked at together


def adapted(
    name: str,
    layers: Sequence[Any],
    modules: Mapping[str, tuple[int, int | None]],
    stack: str = "",
    tied: str = "",
    rows: Callable[[int], Rows | None] = lambda part: None,
) -> AdaptedLayer:
    """Describe `Linear` layers of one shape, which are the parts of one adapted layer; `stack` is a module that may
    stand for all of them, as `of_experts`. `rows` returns what reads rows of a part's weights outside of its layer.

    The description does not keep the layers: a model's weights may be given back while a bank stays.
    """
    first, refs = layers[0], [weakref.ref(layer) for layer in layers]
    division, shard = first.division, first.shard
    divided = division is not None and division.sections and shard.size > 1
    whole = division.rows or sum(each.size for each in division.sections) if divided else 0
    axis = division.axis if divided else None
    merged = getattr(first, "whole", {})  # of all ranks
    own = tuple(first.projections.values()) or (first.out_features,)
    outputs = merged or {"": whole if axis == OUTPUTS else first.out_features}
    groups = getattr(first, "groups", 1)
    sections = getattr(first, "sections", ())

    def part_of(tensor: torch.Tensor, axis: int, among: slice = ALL) -> torch.Tensor:
        part: torch.Tensor = division.part(tensor, shard.rank, shard.size, axis=axis, among=among)
        return part

    def outputs_of(tensor: torch.Tensor, projection: int | None) -> torch.Tensor:
        tensor = in_order(tensor, 0, tuple(outputs.values()), groups) if projection is None else tensor
        if axis != OUTPUTS:
            return tensor
        return part_of(tensor, 0, ALL if projection is None or not sections else sections[projection])

    def bias_of(tensor: torch.Tensor, projection: int | None) -> torch.Tensor:
        mine = outputs_of(tensor, projection)
        return torch.zeros_like(mine) if axis == INPUTS and shard.rank else mine  # one rank adds it

    def norms(part: int, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return row_norms(alive(refs[part]), down, up, rows(part))

    inputs = whole if axis == INPUTS else first.in_features
    return AdaptedLayer(
        name=name,
        in_features=inputs,
        out_features=dict(outputs),
        own_inputs=first.in_features,
        own_outputs=own,
        parts=len(layers),
        modules=modules,
        inputs=lambda down: part_of(down, 1) if axis == INPUTS else down,
        outputs=outputs_of,
        bias=bias_of,
        own_bias=lambda part: _bias(alive(refs[part])),
        stacked=of_experts(stack, len(layers), inputs, sum(outputs.values())) if stack else None,
        norms=None if axis == INPUTS else norms,
        vocabulary=first.head,
        tied=tied,
        weights=None if divided or not first.head else lambda ids: weight_rows(alive(refs[0]), ids),
    )


def undivided(name: str, inputs: int, outputs: int, table: bool = False) -> AdaptedLayer:
    """Describe a layer that each rank has whole, and that has neither projections nor a bias to change."""
    return AdaptedLayer(
        name=name,
        in_features=inputs,
        out_features={"": outputs},
        own_inputs=inputs,
        own_outputs=(outputs,),
        table=table,
        vocabulary=table,
        modules={name: (0, None)},
        inputs=lambda down: down,
        outputs=lambda up, projection: up,
    )


def token_add(bank: AdapterBank, layer: AdaptedLayer) -> TokenAdd | None:
    """Return what adds the adapters' part to a layer's product for the step's tokens; None where there is none."""
    add = bank.layer(layer)
    return None if add is None else lambda x, y: add_chosen(add, x, y, bank.token_slots)


def add_chosen(add: Add, x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Add the adapters' part, unless there are no slots: a speculator calls the layer."""
    return add(x, y, slots) if len(slots) else y


def of_experts(module: str, count: int, inputs: int, outputs: int) -> Stacked:
    """Describe experts whose matrices are two in PEFT's files: A has them one after the other, B has its columns by
    rank, and by expert within one.
    """

    def split(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return down.view(count, -1, inputs), up.view(outputs, -1, count).permute(2, 0, 1)

    return Stacked(module=module, inputs=inputs, outputs=outputs, ranks=count, split=split)


def alive(ref: weakref.ReferenceType[Any]) -> Any:
    """Return a layer whose weights are there. Raises AsleepError."""
    layer = ref()
    if layer is None or any(_is_gone(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
        raise AsleepError("The adapter needs the model's weights, and the model sleeps.")
    return layer


def _bias(layer: Any) -> torch.Tensor | None:
    """Return a layer's bias; zeros where it is on the meta device and has no values."""
    found: torch.Tensor | None = layer.bias
    return torch.zeros(found.shape) if found is not None and found.is_meta else found


def _is_gone(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has lost its memory, as a device's weights do while the host keeps them."""
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


@torch.inference_mode()
def weight_rows(layer: Any, ids: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """Return rows of a layer's weights, and whether they are as in the checkpoint; None where they cannot be read."""
    rows = layer.scheme.rows(layer) if layer.packed else None
    if rows is not None:
        return rows(ids), not layer.quantized
    return None if layer.quantized else (layer.scheme.plain(layer)[ids], True)


def with_added(added: AddedRows, ids: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return rows [tokens, size] of a table, with those of the tokens' adapters for ids that they have added."""
    if added.data is None or not len(slots):
        return rows
    own = added.data[slots, (ids - added.first).clamp(min=0)]
    return torch.where((ids >= added.first).unsqueeze(1), own.to(rows.dtype), rows)


def added_logits(added: AddedRows, hidden: torch.Tensor, bank: AdapterBank) -> torch.Tensor | None:
    """Return the logits [rows, added] float32 of the tokens that adapters add, minus infinity where a row's adapter has
    fewer; None where no row's has any.
    """
    data, counts = added.data, added.counts
    if data is None or counts is None or not bank.row_added:
        return None
    most = max(bank.num_added[slot] for slot in bank.row_added)
    found = hidden.new_zeros((len(hidden), most), dtype=torch.float32)
    for slot in bank.row_added:
        own = torch.nn.functional.linear(hidden.float(), data[slot, :most].float())
        found = torch.where((bank.row_slots == slot).unsqueeze(1), own, found)
    places = torch.arange(most, device=hidden.device)
    return found.masked_fill(places >= counts[bank.row_slots].unsqueeze(1), float("-inf"))


@torch.inference_mode()
def row_norms(layer: Any, down: torch.Tensor, up: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
    """Return the norms of the rows of W + up @ down, float32 [out], of a layer's weights W, however quantized.

    Rows are read where the weights' form allows it, by `rows` where they are not in the layer. Else W is the layer's
    product with unit vectors. Of a layer on the meta device, which has no weights, all norms are 1.
    """
    if any(tensor.is_meta for tensor in layer.parameters()):
        return torch.ones(layer.out_features)
    device = layer.device
    down, up = down.to(device, torch.float32), up.to(device, torch.float32)
    rows = rows or (layer.scheme.rows(layer) if layer.packed else None)
    if rows is not None:
        found = []
        for start in range(0, layer.out_features, _PIECE):
            ids = torch.arange(start, min(start + _PIECE, layer.out_features), device=device)
            found.append((rows(ids).float() + up[start : start + _PIECE] @ down).norm(dim=1))
        return torch.cat(found)
    squares = torch.zeros(layer.out_features, device=device)
    bias = 0.0 if layer.bias is None else layer.bias.float()
    for start in range(0, layer.in_features, _PIECE):
        size = min(_PIECE, layer.in_features - start)
        units = torch.zeros(size, layer.in_features, dtype=layer.dtype, device=device)
        units.diagonal(start).fill_(1)
        columns = layer.scheme.matmul(layer, units).float() - bias
        squares += (columns + down[:, start : start + size].t() @ up.t()).square().sum(0)
    return squares.sqrt()
