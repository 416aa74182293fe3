"""Tokens that an adapter adds to the vocabulary: the rows of an embedding and of a head behind the model's own.

They come in one of two forms. PEFT saves whole tables of V + n rows, of which the first V are the model's; a file
``new_embeddings`` has the n rows alone. Where the adapter also changes the table by low-rank matrices, these have
columns, or rows, for all V + n tokens, and the products of the added ones are merged here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ferrule.errors import CheckpointError
from ferrule.interfaces.adapters import AdaptedLayer, AddedRows
from ferrule_plugins.adapter_bank.lora.files import Entry
from ferrule_plugins.adapter_bank.lora.pace import Pace

_ROWS = {"input_rows": True, "output_rows": False}  # whether they are an embedding's
_PIECE = 1024  # rows that are compared together
_FAR = 0.3  # of a row's norm: a difference that no quantization makes


@dataclass(frozen=True)
class Vocabulary:
    """The layers whose rows are tokens': the embedding's table and the head, as the model has them.

    `most` tokens may be added. `refusal` says why none may, whatever the option says.
    """

    most: int = 0
    refusal: str = ""
    table: AdaptedLayer | None = None
    head: AdaptedLayer | None = None

    @property
    def size(self) -> int:
        return 0 if self.table is None else self.table.in_features

    def has(self, layer: AdaptedLayer) -> bool:
        return layer is self.table or layer is self.head

    @classmethod
    def of(cls, layers: Sequence[AdaptedLayer], most: int, refusal: str) -> Vocabulary:
        """Find them among a model's layers."""
        named = [layer for layer in layers if layer.vocabulary]
        heads = [layer for layer in named if not layer.table]
        size = sum(heads[0].out_features.values()) if heads else 0
        tables = [layer for layer in named if layer.table and layer.in_features == size]
        if len(heads) == 1 and len(tables) == 1:
            return cls(most, refusal, tables[0], heads[0])
        return cls(most, "the model has no embedding and head of one size that adapters can add to")


@dataclass
class Added:
    """The tokens that an adapter adds: `count`, and by tensors' names the layers that these have rows of.

    `rows` are found when the tensors are read: float32 [count, in] by layer's name.
    """

    count: int = 0
    sources: dict[str, AdaptedLayer] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)


def find_added(
    entries: Mapping[str, Entry], layer_of: Callable[[Entry], AdaptedLayer | None], vocabulary: Vocabulary
) -> Added:
    """Return what an adapter adds, by the shapes of its tensors. Raises CheckpointError where that cannot be served."""
    found: dict[str, tuple[AdaptedLayer, int]] = {}
    for name, entry in entries.items():
        if entry.role in _ROWS:
            _check_allowed(vocabulary, entry)
            layer = vocabulary.table if _ROWS[entry.role] else vocabulary.head
            before = 0
        else:
            layer, before = layer_of(entry) if entry.role == "base" else None, vocabulary.size
        if layer is None or not vocabulary.has(layer):
            continue
        if entry.module.endswith(".base_layer") or ".base_layer." in name and entry.shape[:1] == (before,):
            continue  # beside an adapter of the same table, and nothing was added
        if len(entry.shape) != 2 or entry.shape[1] != _width(layer) or entry.shape[0] < before:
            more = f" + added, {_width(layer)}" if before else f"added, {_width(layer)}"
            raise CheckpointError(
                f"the tensor {name!r:.200} has the shape {entry.shape}, and the model needs ({before or ''}{more})."
            )
        if any(layer is other for other, _ in found.values()):
            raise CheckpointError(f"{name!r:.200} and another tensor are both for {layer.name}.")
        found[name] = layer, entry.shape[0] - before
    counts = {name: count for name, (_, count) in found.items()}
    most = max(counts.values(), default=0)
    if most:
        _check_count(counts, vocabulary)
        layers = [layer for layer, _ in found.values()]
        tied = vocabulary.head is not None and bool(vocabulary.head.tied)
        lacks = [one for one in (vocabulary.table, vocabulary.head) if all(one is not layer for layer in layers)]
        if lacks and not (tied and lacks == [vocabulary.head]):
            name = "" if lacks[0] is None else lacks[0].name
            raise CheckpointError(f"it adds {most} tokens, and has no rows of {name} for them.")
    return Added(most, {name: layer for name, (layer, _) in found.items()})


def _check_allowed(vocabulary: Vocabulary, entry: Entry) -> None:
    if vocabulary.refusal:
        raise CheckpointError(f"it adds tokens ({entry.source!r:.200}), and {vocabulary.refusal}.")


def _check_count(counts: Mapping[str, int], vocabulary: Vocabulary) -> None:
    most, names = max(counts.values()), " and ".join(map(repr, counts))
    if vocabulary.refusal:
        raise CheckpointError(f"it adds {most} tokens ({names}), and {vocabulary.refusal}.")
    if min(counts.values()) != most:
        told = ", ".join(f"{count} in {name!r:.200}" for name, count in counts.items())
        raise CheckpointError(f"it adds different numbers of tokens: {told}.")
    if most > vocabulary.most:
        raise CheckpointError(f"it adds {most} tokens, and --lora-extra-vocab-size is {vocabulary.most}.")
    head = vocabulary.head
    if head is not None and head.own_bias is not None and head.own_bias(0) is not None:
        raise CheckpointError(f"it adds {most} tokens, and the model's head has a bias, which they would lack.")


def _width(layer: AdaptedLayer) -> int:
    return sum(layer.out_features.values()) if layer.table else layer.in_features


def take(added: Added, name: str, tensor: torch.Tensor, size: int, dtype: torch.dtype, pace: Pace) -> None:
    """Keep the added rows of a tensor. Raises CheckpointError where the others are not those of the model, or a value
    is not finite.
    """
    layer = added.sources[name]
    before = len(tensor) - added.count
    if before:
        _compare(name, tensor[:size], layer, pace)
    rows = tensor[before:]
    if not bool(torch.isfinite(rows.to(dtype)).all()):
        raise CheckpointError(f"the tensor {name!r:.200} has values that are not finite.")
    added.rows[layer.name] = rows.to(torch.float32, copy=True)


def _compare(name: str, tensor: torch.Tensor, layer: AdaptedLayer, pace: Pace) -> None:
    for start in range(0, len(tensor), _PIECE):
        ids = torch.arange(start, min(start + _PIECE, len(tensor)))
        found = None if layer.weights is None else layer.weights(ids)
        if found is None:
            raise CheckpointError(f"{name!r:.200} cannot be compared with the rows of {layer.name} in the model.")
        if found[0].is_meta:  # a dry run has no weights
            return
        own, exact = found[0].cpu(), found[1]
        given = tensor[start : start + _PIECE]
        if exact:  # one of both may have been rounded
            alike = torch.equal(own, given.to(own.dtype)) or torch.equal(own.to(given.dtype), given)
        else:
            far = (own.float() - given.float()).norm(dim=1) > _FAR * given.float().norm(dim=1).clamp(min=1e-6)
            alike = not bool(far.any())
        if not alike:
            raise CheckpointError(
                f"{name!r:.200} has other rows than the model for tokens of the model: it was trained whole, and whole "
                "weights of its own cannot be served beside those of other adapters."
            )
        pace.rest()


def merge(added: Added, layer: AdaptedLayer, delta: torch.Tensor) -> None:
    """Add the low-rank product [count, in] to a layer's added rows."""
    added.rows[layer.name] = added.rows[layer.name] + delta


@dataclass(frozen=True)
class RowMaker:
    """The sizes of `AddedRows` on the device, which are allocated when the first adapter needs them."""

    slots: int  # that of no adapter included
    most: int
    dtype: torch.dtype
    device: torch.device

    def put(self, added: AddedRows, slot: int, rows: torch.Tensor) -> bool:
        """Copy rows [count, in] to a slot. Returns whether they were the first."""
        data, counts = added.data, added.counts
        if data is None or counts is None:
            counts = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
            data = torch.zeros((self.slots, self.most, rows.shape[1]), dtype=self.dtype, device=self.device)
        data[slot, : len(rows)].copy_(rows)
        counts[slot] = len(rows)
        first, added.counts, added.data = added.data is None, counts, data
        return first

    def clear(self, added: AddedRows, slot: int) -> None:
        if added.counts is not None:
            added.counts[slot] = 0
