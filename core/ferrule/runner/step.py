"""One step's inputs, built from the slots' state without a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, InputEmbeds, StateRows, StepRow
from ferrule.interfaces.platform import StepInput
from ferrule.runner.cache import LayerPlace
from ferrule.runner.state import LongArray, SlotState
from ferrule.types import CacheGroup, Chunk

_BORDERS = 3  # which of a step's inputs are the borders of its rows


@dataclass(frozen=True)
class Rows:
    """A plan's chunks as arrays; one entry per row, and one per token."""

    slots: LongArray  # [rows]
    starts: LongArray  # [rows]
    counts: LongArray  # [rows]
    token_slots: LongArray  # [tokens]
    positions: LongArray  # [tokens]
    borders: LongArray  # [rows + 1] the first token of each row, and how many tokens there are
    longest: int  # context of a row, with its new tokens

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...]) -> Rows:
        columns = ([getattr(chunk, name) for chunk in chunks] for name in ("slot", "start", "count"))
        return cls.at(*columns)

    @classmethod
    def at(cls, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Rows:
        """Return the rows of positions [starts[r], starts[r] + counts[r]) in slots[r]."""
        longest = max(map(add, starts, counts), default=0)
        borders = np.array([0, *accumulate(counts)], dtype=np.int64)
        where, begins, sizes = (np.array(each, dtype=np.int64) for each in (slots, starts, counts))
        if borders[-1] == len(where):  # each has one
            return cls(where, begins, sizes, where, begins, borders, longest)
        positions = np.arange(borders[-1]) + np.repeat(begins - borders[:-1], sizes)
        return cls(where, begins, sizes, np.repeat(where, sizes), positions, borders, longest)

    @property
    def single(self) -> bool:
        """Whether each row has one token."""
        return len(self.positions) == len(self.slots)

    @property
    def last(self) -> LongArray:
        """[rows] index of each row's last token."""
        return self.borders[1:] - 1

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each row's slot, start and count, and the index of its first token."""
        columns = (self.slots, self.starts, self.counts, self.borders[:-1])
        return zip(*(column.tolist() for column in columns), strict=True)


def step_inputs(
    rows: Rows,
    state: SlotState,
    positions: np.ndarray[Any, Any],
    longest: int | None = None,
    groups: Sequence[int] | None = None,
) -> list[StepInput]:
    """Return everything that the device needs to know of a step, in the order in which `StepContext` takes it.

    `positions` are those that the model sees. There are block tables of the cache groups `groups`, or else of all. They
    are wide enough for contexts of `longest` tokens, or of as many as there are. What pads the rows of a step with one
    token each has no context, and a slot that is not written.
    """
    lengths, prompts = rows.starts + rows.counts, state.num_prompt[rows.token_slots]
    given: list[tuple[np.ndarray[Any, Any], int]] = [
        (rows.token_slots * state.stride + rows.positions, 0),
        (positions, 0),
        (np.maximum(prompts, rows.positions + 1), 1),
        (rows.borders.astype(np.int32), len(rows.positions)),
        (lengths.astype(np.int32), 0),
        (rows.slots, 0),
    ]
    most = rows.longest if longest is None else longest
    for number in range(len(state.groups)) if groups is None else groups:
        table, size = state.tables[number], state.groups[number].block_size
        index, within = np.divmod(rows.positions, size)
        blocks = table[rows.token_slots, index].astype(np.int64)
        if blocks.min(initial=1) < 1:
            raise RuntimeError("a plan writes to a position that has no block")
        given += (table[rows.slots, : -(-most // size)], 0), (blocks * size + within, -1)
    if state.adapters is not None:
        given.append((state.adapters[rows.token_slots], 0))
    return [StepInput(torch.from_numpy(values), fill) for values, fill in given]


def part_of(inputs: Sequence[StepInput], number: int, rows: int) -> list[StepInput]:
    """Return the inputs of one of several passes over one token of each row, which were made at once."""
    of_rows, borders = slice(number * rows, (number + 1) * rows), slice(rows + 1)
    return [StepInput(values[borders if at == _BORDERS else of_rows], fill) for at, (values, fill) in enumerate(inputs)]


@dataclass(frozen=True)
class Bindings:
    """The things that stay from step to step: the attention backend, caches and states."""

    attention: AttentionBackend
    groups: tuple[CacheGroup, ...]  # that have block tables
    places: Mapping[str, LayerPlace]
    caches: Mapping[str, torch.Tensor]
    states: Mapping[str, torch.Tensor]


class StepContext:
    """The `ForwardContext` that a model sees: positions, and attention over the paged cache.

    `inputs` are those of `step_inputs`, on the device. `query_lens` and `context_lens` are each row's; in a step that
    is recorded, one query each and the longest context there may be. `adapter_slots` [tokens] means something where
    there is a bank.
    """

    def __init__(
        self,
        bound: Bindings,
        inputs: list[torch.Tensor],
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        embeds: InputEmbeds | None = None,
    ) -> None:
        self._bound = bound
        self.places, positions, self.lengths, query_start, contexts, slots, *paged = inputs
        self.positions = positions if positions.dim() == 1 else positions.t()
        self.embeds, self.adapter_slots = embeds, inputs[-1]
        self._query_lens, self._context_lens = query_lens, context_lens
        self._query_start = query_start
        self._layouts = [
            AttentionLayout(
                query_start=query_start,
                context_lens=contexts,
                block_table=paged[2 * number],
                slot_mapping=paged[2 * number + 1],
                block_size=group.block_size,
                max_query_len=max(query_lens),
                max_context_len=max(context_lens),
                query_lens_host=query_lens,
                context_lens_host=context_lens,
                window=group.window,
            )
            for number, group in enumerate(bound.groups)
        ]
        attended = {place.group for place in bound.places.values() if place.spec.attended}
        self._plans = {number: bound.attention.plan(self._layouts[number]) for number in sorted(attended)}
        self._states: dict[str, StateRows] = {}
        if bound.states:
            starts = query_start.long()
            self._states = {name: StateRows(data, slots, starts, query_lens) for name, data in bound.states.items()}

    def attend(
        self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        bound = self._bound
        if not options.causal:
            return bound.attention.run_uncached(q, k, v, self._query_start, self._query_lens, options)
        plan = self._plans[bound.places[layer].group]
        return bound.attention.run(q, k, v, bound.caches[layer], plan, options)

    def attend_heads(
        self, layer: str, q: torch.Tensor, write: Callable[..., None], options: AttentionOptions
    ) -> torch.Tensor | None:
        bound, plan = self._bound, self._plans[self._bound.places[layer].group]
        return bound.attention.run_heads(q, write, bound.caches[layer], plan, options)

    def state(self, name: str) -> StateRows:
        return self._states[name]

    @cached_property
    def rows(self) -> tuple[StepRow, ...]:
        firsts = accumulate(self._query_lens, initial=0)
        parts = zip(firsts, self._query_lens, self._context_lens, strict=False)
        return tuple(StepRow(first, count, context - count) for first, count, context in parts)

    def recall(self, layer: str, row: int) -> torch.Tensor:
        layout, cache = self._layouts[self._bound.places[layer].group], self._bound.caches[layer]
        begin, size = self.rows[row].begin, layout.block_size
        oldest = max(0, begin - layout.window + 1) if layout.window else 0
        positions = torch.arange(oldest, begin, device=cache.device)
        slots = layout.block_table[row].index_select(0, positions // size).long() * size + positions % size
        return cache.flatten(0, 1).index_select(0, slots)

    def keep(self, layer: str, row: int, entries: torch.Tensor) -> None:
        layout, cache = self._layouts[self._bound.places[layer].group], self._bound.caches[layer]
        part = self.rows[row]
        slots = layout.slot_mapping[part.first : part.first + part.count]
        cache.flatten(0, 1).index_copy_(0, slots, entries.to(cache.dtype))
