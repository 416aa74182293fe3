"""Heads that guess one token after the other: a small model over pairs of a token and the hidden state before it.

Pair i is the token at position i + 1 and the hidden state of position i; the head's output for it is what token i + 2
is guessed by, and takes the place of the hidden state in pair i + 1 as long as there is none of the target's. The head
caches at position i what its attention keeps of pair i.

Hidden states wait until guesses are wanted or a block is full, and then the pairs of several tokens are computed at
once, of which the last begins the chain of guesses. The chain writes to the cache behind it what is overwritten later.
Where a prefix was cached, so were its pairs; the last is of the other request's next token, or of a stand-in for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import nn

from ferrule.interfaces.model import ForwardContext, LayerCache, Model
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule.types import Admit, Chunk
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
class _Pass:
    """Pairs of several requests that are computed at once, and where their hidden states are."""

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[tuple[int, int, int]] = field(default_factory=list)  # slot, start and count of their tokens
    tokens: list[torch.Tensor] = field(default_factory=list)  # of the step, whose hidden states are taken
    places: list[int] = field(default_factory=list)  # pairs whose hidden states waited …
    waited: list[int] = field(default_factory=list)  # … in these rows of `_Waiting`

    def add(self, slot: int, start: int, stop: int, known: int) -> None:
        """Add pairs [start, stop) of a request. The token of the last has a stand-in unless `known` reaches it."""
        self.ids += [(slot, start + 1, known - start)] if known > start else []
        self.ids += [(slot, known, 1)] if stop > known else []
        self.slots.append(slot)
        self.starts.append(start)
        self.counts.append(stop - start)


class _Waiting:
    """The hidden states [slots * each, hidden] of each request's last positions."""

    def __init__(self, slots: int, each: int, like: torch.Tensor) -> None:
        self._each, self._data = each, like.new_zeros(slots * each, like.shape[1])

    def row(self, slot: int, position: int) -> int:
        return slot * self._each + position % self._each

    def read(self, rows: Sequence[int]) -> torch.Tensor:
        return self._data.index_select(0, torch.tensor(rows, device=self._data.device))

    def keep(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> None:
        """Keep the last hidden states of each chunk: [tokens, hidden] of all chunks."""
        rows: list[int] = []
        tokens: list[int] = []
        stop = 0
        for chunk in chunks:
            end, stop = chunk.start + chunk.count, stop + chunk.count
            positions = range(max(chunk.start, end - self._each), end)
            rows += [self.row(chunk.slot, position) for position in positions]
            tokens += range(stop - len(positions), stop)
        places, taken = (torch.tensor(each, device=hidden.device) for each in (rows, tokens))
        self._data.index_copy_(0, places, hidden.index_select(0, taken))


class ChainSpeculator(Speculator):
    """A speculator with a `ChainHead`."""

    def __init__(self, context: SpeculatorContext) -> None:
        build, slots = context.build, context.num_slots
        self._head = head = self.make_head(context)
        head.given = torch.zeros((slots, head.hidden_size), dtype=build.dtype, device=build.device)
        self._block_size, self._most = build.block_size, build.block_size + 1 + context.num_tokens  # pairs that wait
        self._waiting = _Waiting(slots, self._most, head.given)
        self._next: dict[int, int] = {}  # slot → the first pair that is to be computed

    @abstractmethod
    def make_head(self, context: SpeculatorContext) -> ChainHead:
        """Make the head, with its weights. Raises StartupError."""

    def modules(self) -> Sequence[nn.Module]:
        return (self._head,)

    def cache_specs(self) -> Mapping[str, LayerCache]:
        return self._head.cache_specs()

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self._next.pop(admit.slot, None)

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
        features, due = self._head.features(hidden), self._due(chunks)
        if due.slots:
            taken = features.index_select(0, torch.cat(due.tokens).to(features.device))
            if due.places:
                places = torch.tensor(due.places, device=features.device)
                taken = taken.index_copy(0, places, self._waiting.read(due.waited))
            self._follow(due, taken, steps)
        self._waiting.keep(chunks, features)

    def _due(self, chunks: Sequence[Chunk]) -> _Pass:
        """Return the pairs that do not wait for guesses: of long chunks, and of blocks that are full.

        The last pair of a full block is among them: so a block that is cached has nothing that its last owner left. As
        the token of that pair is not known yet, the one before stands in for it.
        """
        due, first = _Pass(), 0
        for chunk in chunks:
            slot, end = chunk.slot, chunk.start + chunk.count
            start = self._next.get(slot, chunk.start)
            certain = end - 1 - chunk.drafts  # pairs before it are of tokens that are no guesses
            full = end // self._block_size > start // self._block_size
            stop = start
            if full and not chunk.wanted:
                stop = end - (end % self._block_size > 0)
            elif end - start > self._most:
                stop = certain
            if stop > start:
                behind = range(start, chunk.start)
                due.places += range(sum(due.counts), sum(due.counts) + len(behind))
                due.waited += [self._waiting.row(slot, position) for position in behind]
                due.tokens.append(torch.arange(start, stop).sub_(chunk.start - first).clamp_(min=0))
                due.add(slot, start, stop, end - 1)
                start = certain
            self._next[slot] = start
            first += chunk.count
        return due

    def _follow(self, made: _Pass, hidden: torch.Tensor, steps: DraftSteps) -> torch.Tensor:
        """Return the results of all pairs [pairs, hidden]."""
        ids = steps.ids(*zip(*made.ids, strict=True))
        if len(ids) > len(made.slots):
            return self._head.follow(ids, hidden, steps.context(made.slots, made.starts, made.counts))
        self._head.given[: len(ids)].copy_(hidden)
        return steps.forward(self._head, made.slots, made.starts, made.counts, ids)

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        """Guess tokens one after the other. Waits for the device to tell the rows' lengths."""
        lengths: list[int] = rows.lengths.tolist()
        first, waited = _Pass(), list[int]()
        for slot, length in zip(rows.slots, lengths, strict=True):
            start, self._next[slot] = self._next[slot], length - 1
            first.add(slot, start, length - 1, length - 1)
            waited += [self._waiting.row(slot, position) for position in range(start, length - 1)]
        hidden = self._follow(first, self._waiting.read(waited), steps)
        if len(hidden) > len(lengths):
            ends = torch.tensor([*accumulate(first.counts)], device=hidden.device) - 1
            hidden = hidden.index_select(0, ends)
        rooms = [1 + steps.room(slot) - (length - 1) for slot, length in zip(rows.slots, lengths, strict=True)]
        counts = [min(pair) for pair in zip(rows.wanted, rooms, strict=True)]
        return self._chain(hidden, rows.slots, lengths, counts, steps)

    def _chain(
        self,
        hidden: torch.Tensor,
        slots: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
        steps: DraftSteps,
    ) -> torch.Tensor:
        """Return guesses [rows, most], `counts` of each row, the first by its hidden state [rows, hidden]."""
        head, left = self._head, list(range(len(slots)))
        ids = head.guess(hidden)
        guesses = ids.new_full((len(ids), max(counts)), -1)
        guesses[:, 0] = ids
        for number in range(1, max(counts)):
            here = [row for row in left if counts[row] > number]
            if len(here) < len(left):
                kept = torch.tensor([left.index(row) for row in here], device=ids.device)
                ids, hidden = ids.index_select(0, kept), hidden.index_select(0, kept)
            if number == 1 or len(here) < len(left):
                starts, left = [lengths[row] - 2 + number for row in here], here
                most = min(counts[row] for row in here) - number  # passes until a row has all of its guesses
                forward = steps.chain(head, [slots[row] for row in here], starts, most)
            head.given[: len(ids)].copy_(hidden)
            hidden = forward(ids)
            ids = head.guess(hidden)
            guesses[here, number] = ids
        return guesses
