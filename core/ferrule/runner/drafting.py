"""A speculator in the runner, and the passes over layers of its own.

Its caches lie in the blocks of the requests: where the target's layers have a group of the same kind, block size and
window, they share its block table, and a block has the entries of both. So the engine plans nothing for them, a cached
prefix brings them too, and preemption takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad

from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.model import Model
from ferrule.interfaces.platform import Recorder, StepInput
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator
from ferrule.runner.cache import CacheMap, Stage
from ferrule.runner.draws import Draws
from ferrule.runner.media import Positions
from ferrule.runner.replay import Given, Replays
from ferrule.runner.state import LongArray, SlotState
from ferrule.runner.step import Bindings, Rows, StepContext, part_of, step_inputs
from ferrule.types import Admit, Chunk

_MOST_EACH = 2  # tokens of a row: the newest, and the last guess where all were right

Recorders = Callable[[], Recorder | None]  # makes one for each model, or none where passes are launched as they are


class DraftPasses(DraftSteps):
    """The passes of a speculator's own layers, over the requests' blocks."""

    def __init__(self, cache: CacheMap, stage: Stage, make_recorder: Recorders, max_len: int) -> None:
        """Find the cache groups that the layers are in. `max_len` is the longest context, in tokens."""
        self._cache, self._stage, self._max_len = cache, stage, max_len
        self._make_recorder = make_recorder
        self._replays: dict[Model, Replays] = {}
        self._groups = sorted({place.group for place in cache.drafts.values()})  # numbers among all groups
        self._places = {
            name: replace(place, group=self._groups.index(place.group)) for name, place in cache.drafts.items()
        }
        self._window = min(filter(None, (cache.groups[number].window for number in self._groups)), default=0)

    def bind(
        self, state: SlotState, positions: Positions, attention: AttentionBackend, storages: Sequence[torch.Tensor]
    ) -> None:
        """Use another cache; every request is forgotten."""
        self._state, self._positions = state, positions
        slots, self.host = state.limits.slots, state.limits.host_memory
        views = self._cache.views(self._places, storages)
        groups = tuple(self._cache.groups[number] for number in self._groups)
        self._bound = Bindings(attention, groups, self._places, views, {})
        self._begun: LongArray = np.zeros(slots, np.int64)  # position at which a slot's newest chunk begins
        self._ids = torch.zeros(_MOST_EACH * slots, dtype=torch.int64, device=state.limits.device)

    @property
    def history(self) -> torch.Tensor:
        """The ids [slots, …] of all requests."""
        return self._state.ids

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Note where the chunks of a step begin."""
        if self._window:
            for chunk in chunks:
                self._begun[chunk.slot] = chunk.start

    def forget(self) -> None:
        """Drop all recordings, and the models that they are of."""
        for replays in self._replays.values():
            replays.forget()

    def drop(self) -> None:
        """Drop the models."""
        self.forget()
        self._replays = {}

    # -------------------------------------------------------------------------------------------- DraftSteps

    def first(self, slot: int) -> int:
        return max(0, int(self._begun[slot]) - self._window + 1) if self._window else 0

    def room(self, slot: int) -> int:
        state = self._state
        return min(
            (int(state.num_blocks[number, slot]) * state.groups[number].block_size for number in self._groups),
            default=self._max_len,
        )

    def context(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> StepContext:
        return self._context(self._rows(slots, starts, counts))

    def ids(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        rows = Rows.at(slots, starts, counts)
        (places,) = self._stage([torch.from_numpy(rows.token_slots * self._state.stride + rows.positions)])
        return self._state.ids.view(-1).index_select(0, places).long()

    def forward(
        self, model: Model, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], ids: torch.Tensor
    ) -> torch.Tensor:
        return self._pass(model, self._rows(slots, starts, counts), ids, self._inputs)

    def chain(
        self, model: Model, slots: Sequence[int], starts: Sequence[int], count: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        each, left, made = [1] * len(slots), [*range(count)], list[StepInput]()

        def given(rows: Rows, longest: int) -> list[StepInput]:
            if not made:
                ahead = [start + more for more in range(count) for start in starts]
                made.extend(self._inputs(Rows.at([*slots] * count, ahead, each * count), longest))
            return part_of(made, int(rows.starts[0]) - starts[0], len(each))

        def forward(ids: torch.Tensor) -> torch.Tensor:
            more = left.pop(0)
            return self._pass(model, self._rows(slots, [start + more for start in starts], each), ids, given)

        return forward

    # ------------------------------------------------------------------------------------------------ passes

    def _rows(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Rows:
        """Return the rows of a pass. Raises RuntimeError where it would write to what was another's since."""
        if any(start < self.first(slot) for slot, start in zip(slots, starts, strict=True)):
            raise RuntimeError("a speculator computes positions that have left its window")
        return Rows.at(slots, starts, counts)

    def _inputs(self, rows: Rows, longest: int | None = None) -> list[StepInput]:
        return step_inputs(rows, self._state, self._positions.of(rows), longest, self._groups)

    def _context(self, rows: Rows) -> StepContext:
        inputs = self._stage([values for values, _ in self._inputs(rows)])
        lengths = tuple((rows.starts + rows.counts).tolist())
        return StepContext(self._bound, inputs, tuple(rows.counts.tolist()), lengths)

    def _pass(self, model: Model, rows: Rows, ids: torch.Tensor, given: Given) -> torch.Tensor:
        """Return what a model makes of `ids`: passes over few tokens of each row are replayed if they can be."""

        def forward(ctx: StepContext) -> torch.Tensor:
            given, count = self._ids, len(ctx.places)  # a padded pass may have more rows than there are slots
            return model.forward(given[:count] if count <= len(given) else pad(given, (0, count - len(given))), ctx)

        replayed = None
        if len(ids) <= len(self._ids) and rows.counts.max() <= _MOST_EACH:
            self._ids[: len(ids)].copy_(ids)
            replayed = self._replays_of(model).run(rows, self._bound, given, forward)
        return model.forward(ids, self._context(rows)) if replayed is None else replayed

    def _replays_of(self, model: Model) -> Replays:
        if model not in self._replays:
            backend, places = self._bound.attention, self._places.values()
            alike = backend.recordable and bool(places) and all(place.spec.attended for place in places)
            self._replays[model] = Replays(self._make_recorder() if alike else None, backend, self._max_len)
        return self._replays[model]


@dataclass(frozen=True)
class Sample:
    """The end of a step: its hidden states, and its draws.

    `positions` are those of the tokens that were drawn, `places` those of the step's tokens that they follow.
    """

    positions: LongArray  # [draws]
    places: LongArray  # [draws]
    hidden: torch.Tensor  # [tokens, hidden]
    tokens: torch.Tensor  # [draws]


class Drafting:
    """A speculator, if there is one, which is told of each step and asked for guesses."""

    def __init__(self, speculator: Speculator | None, passes: DraftPasses, stage: Stage) -> None:
        self.speculator = speculator
        self.passes, self._stage = passes, stage

    def admit(self, admits: Sequence[Admit]) -> None:
        """Tell of requests that take slots."""
        if self.speculator is not None and admits:
            self.speculator.admit(admits)

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> None:
        """Tell of a step's chunks, and the hidden states [tokens, hidden] of their tokens."""
        if self.speculator is not None:
            self.passes.begin(chunks)
            self.speculator.observe(chunks, hidden, self.passes)

    def use(self, speculator: Speculator | None) -> None:
        """Continue with another copy of the same speculator; None drops the present one."""
        self.passes.drop()
        self.speculator = speculator

    def guesses(self, chunks: Sequence[Chunk], draws: Draws, sample: Sample) -> tuple[list[int], torch.Tensor] | None:
        """Return the rows of a step that guesses are wanted for, and guesses [rows, any number] of what follows them.

        None where there are no such rows, or no speculator.
        """
        rows, firsts = [draws.rows[first] for first in draws.firsts.tolist()], draws.firsts
        asked = [place for place, row in enumerate(rows) if chunks[row].wanted]
        if self.speculator is None or not asked:
            return None
        behind = torch.from_numpy((sample.places - sample.positions - 1)[firsts][asked])
        behind, which = self._stage([behind, torch.tensor(asked)])
        lengths = draws.lengths(sample.positions, sample.tokens, self._stage, self.passes.host).index_select(0, which)
        found = [rows[place] for place in asked]
        known = KnownRows(
            slots=tuple([chunks[row].slot for row in found]),
            wanted=tuple([chunks[row].wanted for row in found]),
            lengths=lengths,
            history=self.passes.history,
            hidden=sample.hidden.index_select(0, lengths + behind),
        )
        return found, self.speculator.propose(known, self.passes)
