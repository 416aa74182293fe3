"""Whether an adapter's tensors fit a model: decided by their names and shapes, before any is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdaptedLayer, Stacked
from ferrule_plugins.adapter_bank.lora.added import Added, Vocabulary, find_added
from ferrule_plugins.adapter_bank.lora.files import Entry
from ferrule_plugins.adapter_bank.lora.settings import LoraSettings

Find = Callable[[str], "Sequence[Place]"]

_WRAPPED = ".base_layer"


@dataclass(frozen=True)
class Limits:
    """The bounds of what is loaded, the type of weights in memory, and the layers that tokens can be added to."""

    max_rank: int
    dtype: torch.dtype
    bias: bool  # biases may be there
    vocabulary: Vocabulary = Vocabulary()


@dataclass(frozen=True)
class Place:
    """The place of a module of the model's checkpoint: a part of an adapted layer, and one of the projections that it
    merges, or None for all of them. Where the module is `stacked`, it is all parts.
    """

    layer: AdaptedLayer
    part: int = 0
    projection: int | None = None
    stacked: Stacked | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Inputs and outputs of the module's matrices, in all ranks, and how many ranks of theirs are one of a part."""
        if self.stacked is not None:
            return self.stacked.inputs, self.stacked.outputs, self.stacked.ranks
        sizes = list(self.layer.out_features.values())
        outputs = sum(sizes) if self.projection is None else sizes[self.projection]
        return self.layer.in_features, outputs, 1


@dataclass(frozen=True)
class Fitted:
    """The places of a module, and the factor of its product."""

    places: Sequence[Place]
    scale: float


def fit(
    entries: Mapping[str, Entry], settings: LoraSettings, find: Find, limits: Limits
) -> tuple[dict[str, Fitted], Added]:
    """Return what each module is changed by, and the tokens that are added. Raises CheckpointError for what does not
    fit the model.
    """

    def layer_of(entry: Entry) -> AdaptedLayer | None:
        return next((place.layer for place in find(entry.module)), None)

    added = find_added(entries, layer_of, limits.vocabulary)
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        if name in added.sources:
            continue
        roles = modules.setdefault(entry.module, {})
        if entry.role in roles:
            raise CheckpointError(f"{entry.source!r:.200} and {roles[entry.role].source!r:.200} mean the same.")
        roles[entry.role] = entry
    fitted = {module: _fitted(module, roles, settings, find, limits, added.count) for module, roles in modules.items()}
    _check_apart(fitted)
    return fitted, added


def _fitted(
    module: str, roles: dict[str, Entry], settings: LoraSettings, find: Find, limits: Limits, added: int
) -> Fitted:
    if set(roles) == {"base"}:
        raise CheckpointError(f"the tensor {roles['base'].source!r:.200} is not one of a LoRA adapter's.")
    found = find(module)
    places = [place for place in found if place.stacked is None or _is_for(roles, place)]
    if not found:
        raise CheckpointError(
            f"it changes {module!r:.200}, and the model has no such layer, or none that adapters can change."
        )
    place = (places or found)[0]
    for entry in roles.values():
        _check(_without_added(entry, place.layer, limits.vocabulary, added), place, limits)
    factors = {"down", "up"} & set(roles)
    if len(factors) == 1 or not factors and set(roles) != {"bias"}:
        have, lacks = ("A", "B") if "down" in roles else ("B", "A")
        raise CheckpointError(
            f"it has no matrix {lacks} for {module!r:.200}" + (f", and has {have}." if factors else ".")
        )
    if not factors:
        return Fitted(places, 1.0)
    whole, rank = roles["down"].shape[0], roles["down"].shape[0] // place.sizes[2]
    if roles["up"].shape[1] != whole:
        raise CheckpointError(f"the ranks of A and B differ at {module!r:.200}: {whole} and {roles['up'].shape[1]}.")
    if rank != settings.rank and not settings.mixed:
        raise CheckpointError(
            f"adapter_config.json has the rank {settings.rank}, and the tensors of {module!r:.200} have {rank}."
        )
    if settings.decomposed != ("magnitude" in roles):
        raise CheckpointError(
            f"use_dora is {settings.decomposed} in adapter_config.json, and {module!r:.200} has "
            f"{'a' if 'magnitude' in roles else 'no'} lora_magnitude_vector."
        )
    if settings.decomposed and place.layer.norms is None:
        raise CheckpointError(f"DoRA cannot be served at {module!r:.200}.")
    name = module if place.stacked is None else f"{bare(module)}.{place.layer.name.rpartition('.')[2]}"
    return Fitted(places, settings.scale(name, rank))


def _without_added(entry: Entry, layer: AdaptedLayer, vocabulary: Vocabulary, added: int) -> Entry:
    """Return an entry with the shape that it would have if no tokens were added."""
    axis = {"down": 1} if layer.table else {"up": 0}
    if not added or not vocabulary.has(layer) or entry.role not in axis or len(entry.shape) != 2:
        return entry
    sizes = list(entry.shape)
    sizes[axis[entry.role]] -= added * (sizes[axis[entry.role]] == vocabulary.size + added)
    return replace(entry, shape=tuple(sizes))


def bare(module: str) -> str:
    """Return a module's name without those of wrappers, which PEFT has where it changes several tensors of a module."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def _is_for(roles: Mapping[str, Entry], place: Place) -> bool:
    """Return whether the sizes of a module's matrices are those of a stacked layer."""
    inputs, outputs, _ = place.sizes
    return all(
        entry.shape == {"down": (*entry.shape[:1], inputs), "up": (outputs, *entry.shape[1:2])}.get(entry.role)
        for entry in roles.values()
    )


def _check(entry: Entry, place: Place, limits: Limits) -> None:
    """Check that one tensor has the shape that the model needs, and that what it does is served."""
    layer, shape, source = place.layer, entry.shape, f"{entry.source!r:.200}"
    if entry.role in ("down", "up") and entry.table != layer.table:
        raise CheckpointError(f"the tensor {source} is not for a layer of this kind.")
    if (layer.table or place.stacked is not None) and entry.role not in ("down", "up", "base"):
        raise CheckpointError(f"{source}: of an adapter for this layer only the matrices A and B are served.")
    if entry.role in ("bias", "up_bias") and not limits.bias:
        raise CheckpointError(f"it has biases, such as {source}: --enable-lora-bias serves them.")
    rank = {"down": shape[:1], "up": shape[1:2]}.get(entry.role, ())
    inputs, outputs, ranks = place.sizes
    both = outputs, inputs
    shapes = {"down": (*rank, both[1]), "up": (both[0], *rank), "base": both[::-1] if layer.table else both}
    wanted = shapes.get(entry.role, both[:1])
    if entry.role == "magnitude" and shape in ((*wanted, 1), (1, *wanted)):
        wanted = shape
    if rank and not rank[0]:
        raise CheckpointError(f"the tensor {source} has the rank 0.")
    if shape != wanted or rank and rank[0] % ranks:
        raise CheckpointError(f"the tensor {source} has the shape {shape}, and the model needs {wanted}.")
    if rank and rank[0] // ranks > limits.max_rank:
        raise CheckpointError(f"its rank is {rank[0] // ranks} ({source}), and --max-lora-rank is {limits.max_rank}.")


def _check_apart(fitted: Mapping[str, Fitted]) -> None:
    """Check that no two modules are the same part of a layer."""
    found: dict[tuple[str, int], list[tuple[int | None, str]]] = {}
    for module, each in fitted.items():
        for place in each.places:
            parts = range(place.layer.parts) if place.stacked is not None else (place.part,)
            for part in parts:
                found.setdefault((place.layer.name, part), []).append((place.projection, module))
    for same in found.values():
        projections = [projection for projection, _ in same]
        if len(set(projections)) < len(same) or (None in projections and len(same) > 1):
            raise CheckpointError(f"{same[0][1]!r:.200} and {same[1][1]!r:.200} are the same layer.")
