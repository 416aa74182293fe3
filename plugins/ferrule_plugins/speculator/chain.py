"""Heads that guess one token after the other: a small model over pairs of a token and the hidden state before it.

Pair i is the token at position i + 1 and the hidden state of position i; the head's output for it is what token i + 2
is guessed by, and takes the place of the hidden state in pair i + 1 as long as there is none of the target's. The head
caches at position i what its attention keeps of pair i.

Pair i is computed when its token is known. In a step that computes positions [start, end) of a request these are the
pairs [start, end - 1), and pair start - 1, whose hidden state the step before has left. Pair end - 1 is the first of a
chain of guesses, which writes to the cache behind it what later steps overwrite. Where a prefix was cached, so were its
pairs; only the hidden state of its last position is not known, and that pair stays as the other request left it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ferrule.interfaces.model import ForwardContext, LayerCache, Model
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule.types import Chunk
from ferrule_nn import Naming, load_into
from ferrule_nn.decoder import CachedLayer


class ChainHead(nn.Module, Model):
    """A small model over pairs. Its `forward` takes the hidden states of the pairs from `given`."""

    naming: Naming = Naming()
    hidden_size: int
    given: torch.Tensor  # [at least tokens, hidden], at one address for all passes over one token of each row

    def cache_specs(self) -> dict[str, LayerCache]:
        return {layer.name: layer.cache for layer in self.modules() if isinstance(layer, CachedLayer)}

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of the target [tokens, any size] to those of pairs [tokens, hidden]."""
        return hidden

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.follow(ids, self.given[: len(ids)], ctx)

    @abstractmethod
    def follow(self, ids: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Map pairs of ids [tokens] and hidden states [tokens, hidden] to the hidden states that follow."""

    @abstractmethod
    def guess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map results of `follow` [rows, hidden] to ids of the target [rows]."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_into(self, weights, self.naming)


@dataclass
class _Pairs:
    """Pairs of several requests, in the order of their chunks: which positions, and where their hidden states are."""

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)  # of the step, whose hidden states are taken
    places: list[int] = field(default_factory=list)  # pairs whose hidden state the step before has left …
    left: list[int] = field(default_factory=list)  # … in these slots


class ChainSpeculator(Speculator):
    """A speculator with a `ChainHead`."""

    own_settings = ("model", "revision")

    def __init__(self, context: SpeculatorContext) -> None:
        self._head = head = self.make_head(context)
        self._num_slots = context.num_slots
        self._left: torch.Tensor | None = None  # [slots, size] hidden states of the positions in `_waiting`
        self._waiting: dict[int, tuple[str, int, int]] = {}  # slot → id, epoch and number of a pair to be computed
        head.given = torch.zeros(
            (context.num_slots, head.hidden_size), dtype=context.build.dtype, device=context.build.device
        )

    @abstractmethod
    def make_head(self, context: SpeculatorContext) -> ChainHead:
        """Make the head, with its weights. Raises StartupError."""

    def cache_specs(self) -> Mapping[str, LayerCache]:
        return self._head.cache_specs()

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
        pairs, last = self._pairs(chunks)
        if pairs.slots:
            taken = hidden.index_select(0, torch.cat(pairs.tokens).to(hidden.device))
            if pairs.places and self._left is not None:
                places, left = (torch.tensor(each, device=hidden.device) for each in (pairs.places, pairs.left))
                taken = taken.index_copy(0, places, self._left.index_select(0, left))
            after = [start + 1 for start in pairs.starts]
            ids = steps.ids(pairs.slots, after, pairs.counts)
            ctx = steps.context(pairs.slots, pairs.starts, pairs.counts)
            self._head.follow(ids, self._head.features(taken), ctx)
        if self._left is None:
            self._left = hidden.new_zeros(self._num_slots, hidden.shape[1])
        slots = torch.tensor([chunk.slot for chunk in chunks], device=hidden.device)
        self._left.index_copy_(0, slots, hidden.index_select(0, torch.tensor(last, device=hidden.device)))

    def _pairs(self, chunks: Sequence[Chunk]) -> tuple[_Pairs, list[int]]:
        """Return the pairs that a step completes, and the last token of each chunk."""
        pairs, last, first = _Pairs(), [], 0
        for chunk in chunks:
            end, stop = chunk.start + chunk.count, first + chunk.count
            waits = self._waiting.get(chunk.slot) == (chunk.id, chunk.epoch, chunk.start - 1)
            start = chunk.start - waits
            if end - 1 > start:
                if waits:
                    pairs.places.append(sum(pairs.counts))
                    pairs.left.append(chunk.slot)
                pairs.slots.append(chunk.slot)
                pairs.starts.append(start)
                pairs.counts.append(end - 1 - start)
                pairs.tokens.append(torch.arange(first - waits, stop - 1).clamp_(min=0))
            self._waiting[chunk.slot] = (chunk.id, chunk.epoch, end - 1)
            last.append(stop - 1)
            first = stop
        return pairs, last

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        lengths: list[int] = rows.lengths.tolist()
        slots = torch.tensor(rows.slots, device=rows.history.device)
        ids = rows.history[slots, rows.lengths - 1].long()
        for slot in rows.slots:
            self._waiting.pop(slot, None)
        starts = [length - 2 for length in lengths]
        rooms = [steps.room(slot) - start for slot, start in zip(rows.slots, starts, strict=True)]
        counts = [min(pair) for pair in zip(rows.wanted, rooms, strict=True)]
        guesses = ids.new_full((len(ids), max(1, *counts)), -1)
        head, hidden, left = self._head, self._head.features(rows.hidden), list(range(len(ids)))
        for number in range(max(counts)):
            here = [row for row in left if counts[row] > number]
            if len(here) < len(left):
                kept = torch.tensor([left.index(row) for row in here], device=ids.device)
                ids, hidden, left = ids.index_select(0, kept), hidden.index_select(0, kept), here
            head.given[: len(ids)].copy_(hidden)
            places = [rows.slots[row] for row in here], [starts[row] + number for row in here], [1] * len(here)
            hidden = steps.forward(head, *places, ids)
            ids = head.guess(hidden)
            guesses[here, number] = ids
        return guesses
