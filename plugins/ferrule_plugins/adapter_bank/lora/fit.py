"""Whether an adapter's tensors fit a model: decided by their names and shapes, before any is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdaptedLayer
from ferrule_plugins.adapter_bank.lora.files import Entry
from ferrule_plugins.adapter_bank.lora.settings import LoraSettings

Find = Callable[[str], "Place | None"]


@dataclass(frozen=True)
class Limits:
    """The bounds of what is loaded, and the type of weights in memory."""

    max_rank: int
    dtype: torch.dtype
    bias: bool  # biases may be there


@dataclass(frozen=True)
class Place:
    """The place of a module of the model's checkpoint: a part of an adapted layer, and one of the projections that it
    merges, or None for all of them.
    """

    layer: AdaptedLayer
    part: int
    projection: int | None

    @property
    def outputs(self) -> int:
        """Size of the module's product, in all ranks."""
        sizes = list(self.layer.out_features.values())
        return sum(sizes) if self.projection is None else sizes[self.projection]


@dataclass(frozen=True)
class Fitted:
    """The tensors for one module, by role, and the factor of their product."""

    place: Place
    entries: Mapping[str, Entry]
    scale: float


def fit(entries: Mapping[str, Entry], settings: LoraSettings, find: Find, limits: Limits) -> dict[str, Fitted]:
    """Return what each module is changed by. Raises CheckpointError for what does not fit the model."""
    modules: dict[str, dict[str, Entry]] = {}
    for entry in entries.values():
        roles = modules.setdefault(entry.module, {})
        if entry.role in roles:
            raise CheckpointError(f"{entry.source!r:.200} and {roles[entry.role].source!r:.200} mean the same.")
        roles[entry.role] = entry
    fitted = {module: _fitted(module, roles, settings, find, limits) for module, roles in modules.items()}
    _check_apart(fitted)
    return fitted


def _fitted(module: str, roles: dict[str, Entry], settings: LoraSettings, find: Find, limits: Limits) -> Fitted:
    place = find(module)
    if place is None:
        raise CheckpointError(
            f"it changes {module!r:.200}, and the model has no such layer, or none that adapters can change."
        )
    for entry in roles.values():
        _check(entry, place, limits)
    factors = {"down", "up"} & set(roles)
    if len(factors) == 1 or not factors and set(roles) != {"bias"}:
        have, lacks = ("A", "B") if "down" in roles else ("B", "A")
        raise CheckpointError(
            f"it has no matrix {lacks} for {module!r:.200}" + (f", and has {have}." if factors else ".")
        )
    if not factors:
        return Fitted(place, roles, 1.0)
    rank = roles["down"].shape[0]
    if roles["up"].shape[1] != rank:
        raise CheckpointError(f"the ranks of A and B differ at {module!r:.200}: {rank} and {roles['up'].shape[1]}.")
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
    return Fitted(place, roles, settings.scale(module, rank))


def _check(entry: Entry, place: Place, limits: Limits) -> None:
    """Check that one tensor has the shape that the model needs, and that what it does is served."""
    layer, shape, source = place.layer, entry.shape, f"{entry.source!r:.200}"
    if entry.role in ("down", "up") and entry.table != layer.table:
        raise CheckpointError(f"the tensor {source} is not for a layer of this kind.")
    if layer.table and entry.role not in ("down", "up", "base"):
        raise CheckpointError(f"{source}: of an embedding's adapter only the matrices A and B are served.")
    if entry.role in ("bias", "up_bias") and not limits.bias:
        raise CheckpointError(f"it has biases, such as {source}: --enable-lora-bias serves them.")
    rank = {"down": shape[:1], "up": shape[1:2]}.get(entry.role, ())
    both = place.outputs, layer.in_features
    shapes = {"down": (*rank, both[1]), "up": (both[0], *rank), "base": both[::-1] if layer.table else both}
    wanted = shapes.get(entry.role, both[:1])
    if entry.role == "magnitude" and shape in ((*wanted, 1), (1, *wanted)):
        wanted = shape
    if shape != wanted or 0 in rank:
        raise CheckpointError(f"the tensor {source} has the shape {shape}, and the model needs {wanted}.")
    if rank and rank[0] > limits.max_rank:
        raise CheckpointError(f"its rank is {rank[0]} ({source}), and --max-lora-rank is {limits.max_rank}.")


def _check_apart(fitted: Mapping[str, Fitted]) -> None:
    """Check that no two modules are the same part of a layer."""
    places: dict[tuple[str, int], list[tuple[int | None, str]]] = {}
    for module, each in fitted.items():
        places.setdefault((each.place.layer.name, each.place.part), []).append((each.place.projection, module))
    for found in places.values():
        projections = [projection for projection, _ in found]
        if len(set(projections)) < len(found) or (None in projections and len(found) > 1):
            raise CheckpointError(f"{found[0][1]!r:.200} and {found[1][1]!r:.200} are the same layer.")
