"""An adapter's weights in the host's memory, laid out for the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdaptedLayer
from ferrule_kernels.low_rank import quantize
from ferrule_plugins.adapter_bank.lora.files import AdapterFile
from ferrule_plugins.adapter_bank.lora.fit import Fitted, Limits, Place
from ferrule_plugins.adapter_bank.lora.pace import Pace

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class PartWeights:
    """An adapter's weights for a part of a layer, as this rank has them.

    `downs`, `ups` and `rank_scales` are those of projections: [rank, own in], of a table [in, rank]; [rank, own out];
    and float32 [rank], as in `LowRank`. Where there are `scales` and `offsets`, [own out] of all projections, the
    layer's product is changed by them first.
    """

    downs: dict[int, torch.Tensor] = field(default_factory=dict)
    ups: dict[int, torch.Tensor] = field(default_factory=dict)
    rank_scales: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.downs.values(), *self.ups.values()))


@dataclass(frozen=True)
class Piece:
    """The tensors of a module for one of its places, float32 by role, and the factor of their product."""

    place: Place
    tensors: Mapping[str, torch.Tensor]
    scale: float


Weights = Mapping[tuple[str, int], PartWeights]  # by a layer's name, and part


def read_weights(file: AdapterFile, modules: Mapping[str, Fitted], limits: Limits, pace: Pace) -> Weights:
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
    """Return a copy of a tensor as float32, whose values the type in memory can have; integers have scales for that."""
    if not bool(torch.isfinite(tensor.to(dtype if dtype.is_floating_point else torch.float32)).all()):
        raise CheckpointError(f"the tensor {name!r:.200} has values that are not finite.")
    return tensor.to(torch.float32, copy=True)


def _part(pieces: Sequence[Piece], dtype: torch.dtype) -> PartWeights:
    """Lay out all that changes one part of a layer."""
    layer = pieces[0].place.layer
    starts = [sum(layer.own_outputs[:index]) for index in range(len(layer.own_outputs) + 1)]
    made, ups, downs = PartWeights(), dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    for piece in pieces:
        own, projection = piece.tensors, piece.place.projection
        if "down" not in own:
            continue
        down = own["down"] if layer.table else layer.inputs(own["down"])
        up = layer.outputs(own["up"], projection) * piece.scale
        parts = up.split_with_sizes(list(layer.own_outputs)) if projection is None else (up,)
        for index, part in enumerate(parts, projection or 0):
            downs[index], ups[index] = down, part
    if any({"magnitude", "bias", "up_bias"} & set(piece.tensors) for piece in pieces):
        _change(made, pieces, ups, downs, starts)
    for index, up in ups.items():
        if made.scales is not None:
            up = up * made.scales[starts[index] : starts[index + 1]].unsqueeze(1)
        down, up, rank_scales = _converted(downs[index], up.t(), dtype)
        made.downs[index] = (down.t() if layer.table else down).contiguous()
        made.ups[index], made.rank_scales[index] = up.contiguous(), rank_scales
        if not bool(torch.isfinite(up).all() and torch.isfinite(rank_scales).all()):
            raise CheckpointError(f"its weights for {layer.name}, times its scale, are not finite.")
    return made


def _converted(
    down: torch.Tensor, up: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return matrices [rank, in] and [rank, out] in the type of the memory, and the scales of ranks."""
    if dtype == torch.int8:
        return quantize(down, up)
    return down.to(dtype), up.to(dtype), torch.ones(len(up))


def _change(
    made: PartWeights,
    pieces: Sequence[Piece],
    ups: Mapping[int, torch.Tensor],
    downs: Mapping[int, torch.Tensor],
    starts: list[int],
) -> None:
    """Set `scales` and `offsets`: magnitudes of DoRA (Liu et al. 2024) for rows of the sum of weights and adapter, then
    biases.
    """
    layer, part = pieces[0].place.layer, pieces[0].place.part
    total = starts[-1]
    scales, offsets = torch.ones(total), torch.zeros(total)
    bias = None if layer.own_bias is None else layer.own_bias(part)
    own_bias = torch.zeros(total) if bias is None else bias.detach().float().cpu()
    norms = _norms(layer, part, ups, downs, starts) if any("magnitude" in piece.tensors for piece in pieces) else None
    for piece in pieces:
        own, projection = piece.tensors, piece.place.projection
        rows = slice(0, total) if projection is None else slice(starts[projection], starts[projection + 1])
        if "magnitude" in own and norms is not None:
            magnitude = layer.outputs(own["magnitude"].flatten(), projection)
            scales[rows] = magnitude / norms[rows]
            offsets[rows] += own_bias[rows] * (1 - scales[rows])
        take = layer.bias or layer.outputs
        if "bias" in own:
            if bias is None:
                raise CheckpointError(f"it has a bias for {layer.name}, which has none in the model.")
            offsets[rows] += take(own["bias"], projection) - own_bias[rows]
        if "up_bias" in own:
            offsets[rows] += take(own["up_bias"], projection) * piece.scale * scales[rows]
    if not bool(torch.isfinite(scales).all() and torch.isfinite(offsets).all()):
        raise CheckpointError(f"its magnitudes or biases for {layer.name} are not finite there.")
    made.scales, made.offsets = scales, offsets


def _norms(
    layer: AdaptedLayer,
    part: int,
    ups: Mapping[int, torch.Tensor],
    downs: Mapping[int, torch.Tensor],
    starts: list[int],
) -> torch.Tensor:
    """Return the norms of the rows of a part's weights, with the adapter's products."""
    if layer.norms is None:
        raise CheckpointError(f"DoRA cannot be served at {layer.name}.")
    down = torch.cat([downs[index] for index in ups])
    up = torch.zeros(starts[-1], len(down))
    first = 0
    for index, matrix in ups.items():
        up[starts[index] : starts[index + 1], first : first + matrix.shape[1]] = matrix
        first += matrix.shape[1]
    return layer.norms(part, down, up).cpu()
