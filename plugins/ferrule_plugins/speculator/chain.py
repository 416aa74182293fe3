"""Heads that guess one token after the other: a small model over pairs of a token and the hidden state before it.

Pair i is the token at position i + 1 and the hidden state of position i; the head's output for it is what token i + 2
is guessed by, and takes the place of the hidden state in pair i + 1 as long as there is none of the target's. The head
caches at position i what its attention keeps of pair i.

Pair i is computed when its token is known. In a step that computes positions [start, end) of a request these are the
pairs [start, end - 1), and pair start - 1, whose hidden state the step before has left. Pair end - 1 is the first of a
chain of guesses, which writes to the cache behind it what later steps overwrite. Where a prefix was cached, so were its
pairs; only the last one is of the other request's next token, or of a stand-in for it.
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
    """Pairs that a step completes, by request, and where their hidden states are."""

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[tuple[int, int, int]] = field(default_factory=list)  # slot, start and count of their tokens
    tokens: list[torch.Tensor] = field(default_factory=list)  # of the step, whose hidden states are taken
    places: list[int] = field(default_factory=list)  # pairs with the hidden state of a step before …
    kept: list[int] = field(default_factory=list)  # … in these rows of `_Kept`


class _Kept:
    """The hidden states of each request's last positions, those behind which its next chunk may begin."""

    def __init__(self, slots: int, each: int) -> None:
        self._slots, self._each = slots, each
        self._of: dict[int, tuple[str, int, range]] = {}  # by slot: id and epoch, and positions
        self._data: torch.Tensor | None = None  # [slots * each, size]

    def has(self, chunk: Chunk) -> bool:
        """Return whether the hidden state before a chunk is there."""
        id, epoch, positions = self._of.get(chunk.slot, ("", 0, range(0)))
        return (id, epoch) == (chunk.id, chunk.epoch) and chunk.start - 1 in positions

    def row(self, slot: int, position: int) -> int:
        return slot * self._each + position % self._each

    def read(self, rows: Sequence[int]) -> torch.Tensor:
        """Return hidden states [rows, size]. Raises RuntimeError where none were kept."""
        if self._data is None:
            raise RuntimeError("no hidden states were kept")
        return self._data.index_select(0, torch.tensor(rows, device=self._data.device))

    def keep(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> None:
        """Keep those that a step has computed: the last of each chunk, and those before its guesses."""
        if self._data is None:
            self._data = hidden.new_zeros(self._slots * self._each, hidden.shape[1])
        rows: list[int] = []
        tokens: list[int] = []
        stop = 0
        for chunk in chunks:
            end, stop = chunk.start + chunk.count, stop + chunk.count
            positions = range(max(chunk.start, end - 1 - chunk.drafts), end)
            self._of[chunk.slot] = chunk.id, chunk.epoch, positions
            rows += [self.row(chunk.slot, position) for position in positions]
            tokens += range(stop - len(positions), stop)
        places, taken = (torch.tensor(each, device=hidden.device) for each in (rows, tokens))
        self._data.index_copy_(0, places, hidden.index_select(0, taken))

    def drop(self, slots: Sequence[int]) -> None:
        """Forget those of requests, whose pairs were computed."""
        for slot in slots:
            self._of.pop(slot, None)


class ChainSpeculator(Speculator):
    """A speculator with a `ChainHead`."""

    def __init__(self, context: SpeculatorContext) -> None:
        build, self._block_size = context.build, context.build.block_size
        self._head = head = self.make_head(context)
        self._kept = _Kept(context.num_slots, 1 + context.num_tokens)
        head.given = torch.zeros((context.num_slots, head.hidden_size), dtype=build.dtype, device=build.device)

    @abstractmethod
    def make_head(self, context: SpeculatorContext) -> ChainHead:
        """Make the head, with its weights. Raises StartupError."""

    def modules(self) -> Sequence[nn.Module]:
        return (self._head,)

    def cache_specs(self) -> Mapping[str, LayerCache]:
        return self._head.cache_specs()

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
        pairs = self._pairs(chunks)
        if pairs.slots:
            taken = hidden.index_select(0, torch.cat(pairs.tokens).to(hidden.device))
            if pairs.kept:
                places = torch.tensor(pairs.places, device=hidden.device)
                taken = taken.index_copy(0, places, self._kept.read(pairs.kept))
            ids = steps.ids(*zip(*pairs.ids, strict=True))
            ctx = steps.context(pairs.slots, pairs.starts, pairs.counts)
            self._head.follow(ids, self._head.features(taken), ctx)
        self._kept.keep(chunks, hidden)

    def _pairs(self, chunks: Sequence[Chunk]) -> _Pairs:
        """Return the pairs of all positions before the last of each chunk, from the one before its first on.

        Where a block ends, its last pair too, for which the token that is not known yet is replaced by the one before:
        a block that is cached has nothing in it that its last owner left.
        """
        pairs, first = _Pairs(), 0
        for chunk in chunks:
            end = chunk.start + chunk.count
            before, whole = int(self._kept.has(chunk)), int(end % self._block_size == 0)
            start = chunk.start - before
            known = end - 1 - start
            if known:
                pairs.ids.append((chunk.slot, start + 1, known))
            if whole:
                pairs.ids.append((chunk.slot, end - 1, 1))
            if known + whole:
                if before:
                    pairs.places.append(sum(pairs.counts))
                    pairs.kept.append(self._kept.row(chunk.slot, start))
                pairs.slots.append(chunk.slot)
                pairs.starts.append(start)
                pairs.counts.append(known + whole)
                pairs.tokens.append(torch.arange(first - before, first + chunk.count - 1 + whole).clamp_(min=0))
            first += chunk.count
        return pairs

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        """Guess tokens one after the other. Waits for the device to tell the rows' lengths."""
        lengths: list[int] = rows.lengths.tolist()
        self._kept.drop(rows.slots)
        slots = torch.tensor(rows.slots, device=rows.history.device)
        ids = rows.history[slots, rows.lengths - 1].long()
        rooms = [steps.room(slot) - (length - 2) for slot, length in zip(rows.slots, lengths, strict=True)]
        counts = [min(pair) for pair in zip(rows.wanted, rooms, strict=True)]
        guesses = ids.new_full((len(ids), max(1, *counts)), -1)
        head, hidden, left = self._head, self._head.features(rows.hidden), list(range(len(ids)))
        for number in range(max(counts)):
            here = [row for row in left if counts[row] > number]
            if len(here) < len(left):
                kept = torch.tensor([left.index(row) for row in here], device=ids.device)
                ids, hidden, left = ids.index_select(0, kept), hidden.index_select(0, kept), here
            head.given[: len(ids)].copy_(hidden)
            starts = [lengths[row] - 2 + number for row in here]
            hidden = steps.forward(head, [rows.slots[row] for row in here], starts, [1] * len(here), ids)
            ids = head.guess(hidden)
            guesses[here, number] = ids
        return guesses
