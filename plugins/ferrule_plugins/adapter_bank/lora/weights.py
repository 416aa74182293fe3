"""An adapter's weights in the host's memory, laid out for the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdaptedLayer
from ferrule_kernels.low_rank import quantize
from ferrule_plugins.adapter_bank.lora.added import Added, merge, take
from ferrule_plugins.adapter_bank.lora.files import AdapterFile
from ferrule_plugins.adapter_bank.lora.fit import Fitted, Limits, Place
from ferrule_plugins.adapter_bank.lora.pace import Pace

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # A, B, and the scales of ranks, as `LowRank` has them


@dataclass(frozen=True)
class Change:
    """Changes of a part's product besides A and B: magnitudes of DoRA, biases in the place of the model's, and those of
    B times the adapter's scale. Each is [own out] of all projections, with NaN where there is none.
    """

    magnitudes: torch.Tensor
    biases: torch.Tensor
    up_biases: torch.Tensor


@dataclass
class PartWeights:
    """An adapter's weights for a part of a layer, as this rank has them.

    `downs`, `ups` and `rank_scales` are those of projections: [rank, own in], of a table [in, rank]; [rank, own out];
    and float32 [rank], as in `LowRank`. Where there is a `change`, matrices are float32, and `scales` and `offsets`,
    [own out] of all projections, follow from it and from the model's weights: the layer's product is changed by them,
    and ups are times the scales.
    """

    downs: dict[int, torch.Tensor] = field(default_factory=dict)
    ups: dict[int, torch.Tensor] = field(default_factory=dict)
    rank_scales: dict[int, torch.Tensor] = field(default_factory=dict)
    change: Change | None = None
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    def stored(self, projection: int, outputs: Sequence[int], dtype: torch.dtype) -> Stored:
        """Return a projection's matrices as they are stored in memory, for projections with so many outputs."""
        down, up, start = self.downs[projection], self.ups[projection], sum(outputs[:projection])
        if self.change is None:
            return down, up, self.rank_scales[projection]
        scales = 1.0 if self.scales is None else self.scales[start : start + outputs[projection]]
        return _converted(down, up * scales, dtype)

    def follow(self, layer: AdaptedLayer, part: int) -> None:
        """Compute what depends on the model's weights. Raises CheckpointError for what is not finite with these, and
        AsleepError.
        """
        change = self.change
        if change is None:
            return
        bias = None if layer.own_bias is None else layer.own_bias(part)
        if bias is None and not bool(change.biases.isnan().all()):
            raise CheckpointError(f"it has a bias for {layer.name}, which has none in the model.")
        own_bias = torch.zeros(len(change.biases)) if bias is None else bias.detach().float().cpu()
        decomposed = ~change.magnitudes.isnan()
        scales = torch.ones_like(own_bias)
        if bool(decomposed.any()):
            norms = _norms(layer, part, self)
            scales[decomposed] = change.magnitudes[decomposed] / norms[decomposed]
        offsets = torch.where(change.biases.isnan(), own_bias, change.biases) - own_bias * scales
        offsets += change.up_biases.nan_to_num() * scales
        if not bool(torch.isfinite(scales).all() and torch.isfinite(offsets).all()):
            raise CheckpointError(f"its magnitudes or biases for {layer.name} are not finite there.")
        self.scales, self.offsets = scales, offsets


@dataclass(frozen=True)
class Piece:
    """The tensors of a module for one of its places, float32 by role, and the factor of their product."""

    place: Place
    tensors: Mapping[str, torch.Tensor]
    scale: float


Weights = Mapping[tuple[str, int], PartWeights]  # by a layer's name, and part


@dataclass(frozen=True)
class AdapterData:
    """An adapter in the host's memory. Its positions are divided by `factor`; None: they are the model's."""

    weights: Weights
    added: Added
    factor: float | None = None


@dataclass(frozen=True)
class Contents:
    """The contents of an adapter's folder. `tensors` are float32, by module and role; `tables` are those of `added`."""

    modules: Mapping[str, Fitted]
    added: Added
    factor: float | None
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    tables: dict[str, torch.Tensor] = field(default_factory=dict)


def read_tensors(file: AdapterFile, contents: Contents, limits: Limits, pace: Pace) -> None:
    """Read an adapter's tensors. Raises CheckpointError for types, and for values that are not finite."""
    for name, tensor in file.read():
        entry = file.entries[name]
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"the tensor {name!r:.200} is of {tensor.dtype}; adapters are float32, float16 or bfloat16."
            )
        if name in contents.added.sources:
            contents.tables[name] = tensor.clone()  # the folder may hang when it is looked at
        elif entry.role != "base":
            roles = contents.tensors.setdefault(entry.module, {})
            roles[entry.role] = _finite(name, tensor, limits.dtype)
        pace.rest()


def lay_out(contents: Contents, limits: Limits, pace: Pace) -> AdapterData:
    """Lay an adapter's tensors out for the layers of the model. Raises CheckpointError for values that are not finite
    then and for tables that are not those of the model, and AsleepError.
    """
    added, tensors = contents.added, contents.tensors
    for name, table in contents.tables.items():
        take(added, name, table, limits.vocabulary.size, float_of(limits.dtype), pace)
    _complete(added, limits)
    pieces: dict[tuple[str, int], list[Piece]] = {}
    for module, fitted in contents.modules.items():
        _merge_added(added, fitted, tensors.get(module, {}), limits)
        for piece in _pieces(fitted, tensors.get(module, {})):
            pieces.setdefault((piece.place.layer.name, piece.place.part), []).append(piece)
    weights: dict[tuple[str, int], PartWeights] = {}
    for key, own in pieces.items():
        weights[key] = _part(own, limits.dtype)
        pace.rest()
    return AdapterData(weights, added, contents.factor)


def _complete(added: Added, limits: Limits) -> None:
    """Give a head that shares the embedding's table the rows that were added to that, if it has none of its own."""
    head, table = limits.vocabulary.head, limits.vocabulary.table
    if added.count and head is not None and table is not None:
        added.rows.setdefault(head.name, added.rows[table.name])


def _merge_added(added: Added, fitted: Fitted, tensors: dict[str, torch.Tensor], limits: Limits) -> None:
    """Merge what low-rank matrices say of added tokens into their rows, and cut it off."""
    layer, size = fitted.places[0].layer, limits.vocabulary.size
    if not added.count or not limits.vocabulary.has(layer) or "down" not in tensors:
        return
    down, up = tensors["down"], tensors["up"]
    if layer.table and down.shape[1] > size:
        merge(added, layer, fitted.scale * (down[:, size:].t() @ up.t()))
        tensors["down"] = down[:, :size]
    elif not layer.table and len(up) > size:
        merge(added, layer, fitted.scale * (up[size:] @ down))
        tensors["up"] = up[:size]


def _pieces(fitted: Fitted, tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    for place in fitted.places:
        if place.stacked is None:
            yield Piece(place, tensors, fitted.scale)
            continue
        downs, ups = place.stacked.split(tensors["down"], tensors["up"])
        for part, (down, up) in enumerate(zip(downs, ups, strict=True)):
            yield Piece(replace(place, part=part), {"down": down, "up": up}, fitted.scale)


def float_of(dtype: torch.dtype) -> torch.dtype:
    """Return the type of an adapter's weights that are never integers."""
    return dtype if dtype.is_floating_point else torch.bfloat16


def _finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor as float32, whose values the type in memory can have; integers have scales for that."""
    if not bool(torch.isfinite(tensor.to(float_of(dtype))).all()):
        raise CheckpointError(f"the tensor {name!r:.200} has values that are not finite.")
    return tensor.to(torch.float32, copy=True)


def _part(pieces: Sequence[Piece], dtype: torch.dtype) -> PartWeights:
    """Lay out all that changes one part of a layer."""
    layer = pieces[0].place.layer
    made, change = PartWeights(), _change(pieces)
    for piece in pieces:
        own, projection = piece.tensors, piece.place.projection
        if "down" not in own:
            continue
        down = own["down"] if layer.table else layer.inputs(own["down"])
        up = layer.outputs(own["up"], projection) * piece.scale
        parts = up.split_with_sizes(list(layer.own_outputs)) if projection is None else (up,)
        for index, part in enumerate(parts, projection or 0):
            made.downs[index], made.ups[index] = down, part.t().contiguous()
    made.change = change
    made.follow(layer, pieces[0].place.part)
    for index in made.ups:
        if change is None:
            down, made.ups[index], made.rank_scales[index] = _converted(made.downs[index], made.ups[index], dtype)
            made.downs[index] = (down.t() if layer.table else down).contiguous()
        _, up, rank_scales = made.stored(index, layer.own_outputs, dtype)
        if not bool(torch.isfinite(up).all() and torch.isfinite(rank_scales).all()):
            raise CheckpointError(f"its weights for {layer.name}, times its scale, are not finite.")
    return made


def _converted(down: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> Stored:
    """Return matrices [rank, in] and [rank, out] in the type of the memory, and the scales of ranks."""
    if dtype == torch.int8:
        return quantize(down, up)
    return down.to(dtype), up.to(dtype), torch.ones(len(up))


def _change(pieces: Sequence[Piece]) -> Change | None:
    """Return the magnitudes (DoRA: Liu et al. 2024) and biases of a part of a layer; None where it has none."""
    layer = pieces[0].place.layer
    if not any({"magnitude", "bias", "up_bias"} & set(piece.tensors) for piece in pieces):
        return None
    total = sum(layer.own_outputs)
    made = Change(*(torch.full((total,), torch.nan) for _ in range(3)))
    take = layer.bias or layer.outputs
    for piece in pieces:
        own, projection = piece.tensors, piece.place.projection
        start = sum(layer.own_outputs[: projection or 0])
        rows = slice(0, total) if projection is None else slice(start, start + layer.own_outputs[projection])
        if "magnitude" in own:
            made.magnitudes[rows] = layer.outputs(own["magnitude"].flatten(), projection)
        if "bias" in own:
            made.biases[rows] = take(own["bias"], projection)
        if "up_bias" in own:
            made.up_biases[rows] = take(own["up_bias"], projection) * piece.scale
    return made


def _norms(layer: AdaptedLayer, part: int, weights: PartWeights) -> torch.Tensor:
    """Return the norms of the rows of a part's weights, with the adapter's products."""
    if layer.norms is None:
        raise CheckpointError(f"DoRA cannot be served at {layer.name}.")
    down = torch.cat([weights.downs[index].float() for index in weights.ups])
    up = torch.zeros(sum(layer.own_outputs), len(down))
    first = 0
    for index, matrix in weights.ups.items():
        start = sum(layer.own_outputs[:index])
        up[start : start + matrix.shape[1], first : first + len(matrix)] = matrix.t()
        first += len(matrix)
    return layer.norms(part, down, up).cpu()
