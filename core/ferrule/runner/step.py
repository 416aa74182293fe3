"""One step's inputs, built from the slots' state without a loop over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, StateRows
from ferrule.runner.cache import LayerPlace
from ferrule.runner.state import SlotState
from ferrule.types import CacheGroup, Chunk

LongArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Rows:
    """A plan's chunks as arrays; one entry per row, and one per token."""

    slots: LongArray  # [rows]
    starts: LongArray  # [rows]
    counts: LongArray  # [rows]
    token_slots: LongArray  # [tokens]
    positions: LongArray  # [tokens]

    @classmethod
    def of(cls, chunks: tuple[Chunk, ...]) -> Rows:
        slots, starts, counts = (
            np.array([getattr(chunk, name) for chunk in chunks], dtype=np.int64) for name in ("slot", "start", "count")
        )
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        return cls(slots, starts, counts, np.repeat(slots, counts), np.repeat(starts, counts) + within)

    @property
    def last(self) -> LongArray:
        """[rows] index of each row's last token."""
        return np.cumsum(self.counts) - 1


class StepContext:
    """The `ForwardContext` that a model sees: positions, and attention over the paged cache."""

    def __init__(
        self,
        rows: Rows,
        state: SlotState,
        attention: AttentionBackend,
        places: Mapping[str, LayerPlace],
        caches: Mapping[str, torch.Tensor],
    ) -> None:
        self._rows = rows
        self._state = state
        self._attention = attention
        self._places = places
        self._caches = caches
        self._plans: dict[int, Any] = {}
        self._states: dict[str, StateRows] = {}
        self._device = state.ids.device
        self.positions = torch.from_numpy(rows.positions).to(self._device)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[tokens] int64: max(prompt length, position + 1) of each token's request."""
        prompts = self._state.num_prompt[self._rows.token_slots].astype(np.int64)
        return torch.from_numpy(np.maximum(prompts, self._rows.positions + 1)).to(self._device)

    def ids(self) -> torch.Tensor:
        """[tokens] int64, read on the device: the newest may not be known to the host."""
        flat = torch.from_numpy(self._rows.token_slots * self._state.max_len + self._rows.positions)
        return self._state.ids.view(-1).index_select(0, flat.to(self._device)).long()

    def prepare(self, groups: tuple[CacheGroup, ...], states: Mapping[str, torch.Tensor]) -> None:
        """Let attention plan once per group; say where this step's rows are in each of the `states`."""
        for number, group in enumerate(groups):
            self._plans[number] = self._attention.plan(self._layout(number, group))
        if states:
            starts = np.concatenate(([0], np.cumsum(self._rows.counts)))
            slots, query_start = (torch.from_numpy(each).to(self._device) for each in (self._rows.slots, starts))
            lengths = tuple(self._rows.counts.tolist())
            self._states = {name: StateRows(data, slots, query_start, lengths) for name, data in states.items()}

    def attend(
        self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        plan = self._plans[self._places[layer].group]
        return self._attention.run(q, k, v, self._caches[layer], plan, options)

    def state(self, name: str) -> StateRows:
        return self._states[name]

    def _layout(self, number: int, group: CacheGroup) -> AttentionLayout:
        rows, size = self._rows, group.block_size
        lengths = rows.starts + rows.counts
        most = int(lengths.max())
        table = self._state.tables[number].numpy()
        blocks = table[rows.token_slots, rows.positions // size].astype(np.int64)
        if not blocks.all():
            raise RuntimeError("a plan writes to a position that has no block")
        host = table[rows.slots, : -(-most // size)]
        return AttentionLayout(
            query_start=self._int32(np.concatenate(([0], np.cumsum(rows.counts)))),
            context_lens=self._int32(lengths),
            block_table=torch.from_numpy(host).to(self._device),
            slot_mapping=torch.from_numpy(blocks * size + rows.positions % size).to(self._device),
            block_size=size,
            max_query_len=int(rows.counts.max()),
            max_context_len=most,
            query_lens_host=tuple(rows.counts.tolist()),
            context_lens_host=tuple(lengths.tolist()),
            window=group.window,
        )

    def _int32(self, values: LongArray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device)
