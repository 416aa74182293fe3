"""An adapter's weights in the host's memory, laid out for the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdaptedLayer
from ferrule_plugins.adapter_bank.lora.files import AdapterFile
from ferrule_plugins.adapter_bank.lora.fit import Fitted, Limits, Place
from ferrule_plugins.adapter_bank.lora.pace import Pace

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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

    `downs` and `ups` are those of projections: [rank, own in], of a table [in, rank]; and [rank, own out]. Where there
    is a `change`, ups are float32, and `scales` and `offsets`, [own out] of all projections, follow from it and from
    the model's weights: the layer's product is changed by them, and ups are times the scales.
    """

    downs: dict[int, torch.Tensor] = field(default_factory=dict)
    ups: dict[int, torch.Tensor] = field(default_factory=dict)
    change: Change | None = None
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    def scaled(self, projection: int, outputs: Sequence[int]) -> torch.Tensor:
        """Return B of a projection, times the scales, for projections with so many outputs."""
        up, start = self.ups[projection], sum(outputs[:projection])
        return up if self.scales is None else up * self.scales[start : start + outputs[projection]]

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


Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # float32, by module, and role


def read_tensors(file: AdapterFile, limits: Limits, pace: Pace) -> Tensors:
    """Read an adapter's tensors. Raises CheckpointError for types, and for values that are not finite."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in file.read():
        entry = file.entries[name]
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"the tensor {name!r:.200} is of {tensor.dtype}; adapters are float32, float16 or bfloat16."
            )
        if entry.role != "base":
            tensors.setdefault(entry.module, {})[entry.role] = _finite(name, tensor, limits.dtype)
        pace.rest()
    return tensors


def lay_out(tensors: Tensors, modules: Mapping[str, Fitted], limits: Limits, pace: Pace) -> Weights:
    """Lay an adapter's tensors out for the layers of the model. Raises CheckpointError for values that are not finite
    then, and AsleepError.
    """
    pieces: dict[tuple[str, int], list[Piece]] = {}
    for module, fitted in modules.items():
        for piece in _pieces(fitted, tensors.get(module, {})):
            pieces.setdefault((piece.place.layer.name, piece.place.part), []).append(piece)
    weights: dict[tuple[str, int], PartWeights] = {}
    for key, own in pieces.items():
        weights[key] = _part(own, limits.dtype)
        pace.rest()
    return weights


def _pieces(fitted: Fitted, tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    for place in fitted.places:
        if place.stacked is None:
            yield Piece(place, tensors, fitted.scale)
            continue
        downs, ups = place.stacked.split(tensors["down"], tensors["up"])
        for part, (down, up) in enumerate(zip(downs, ups, strict=True)):
            yield Piece(replace(place, part=part), {"down": down, "up": up}, fitted.scale)


def _finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor as float32, whose values the type in memory can have."""
    if not bool(torch.isfinite(tensor.to(dtype)).all()):
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
        down = own["down"].t() if layer.table else layer.inputs(own["down"])
        up = layer.outputs(own["up"], projection) * piece.scale
        parts = up.split_with_sizes(list(layer.own_outputs)) if projection is None else (up,)
        for index, part in enumerate(parts, projection or 0):
            made.downs[index] = down.to(dtype).contiguous()
            made.ups[index] = part.t().to(dtype if change is None else torch.float32).contiguous()
    made.change = change
    made.follow(layer, pieces[0].place.part)
    for index in made.ups:
        if not bool(torch.isfinite(made.scaled(index, layer.own_outputs).to(dtype)).all()):
            raise CheckpointError(f"its weights for {layer.name}, times its scale, are not finite.")
    return made


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
