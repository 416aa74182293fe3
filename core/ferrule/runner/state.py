"""The runner's state of each slot: ids, parameters, block tables. A plan changes only what it names.

Ids live on the device, because a sampled token is an input of the next step before the host has seen it. Everything
that the host decides (lengths, tables) has a host copy, so that no device needs to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.adapters import AdapterBank
from ferrule.interfaces.sampler import LogprobsMode, TypicalAcceptance
from ferrule.types import Admit, CacheGroup, Chunk, StepPlan, TokenSampling, Work

IntArray = np.ndarray[Any, np.dtype[np.int32]]
LongArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class RunnerLimits:
    """The limits of a runner.

    `vocab_size` is the width of logits; `max_model_len` is in tokens; `embed_size` is told by the model.
    """

    slots: int
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    host_memory: bool = False  # the device's tensors lie in the host's memory
    embed_size: int = 0
    block_size: int = 16  # of a model without blocks: where its prefixes may end
    cache_type: torch.dtype | None = None  # of the KV cache's elements; None: `dtype`
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    typical: TypicalAcceptance | None = None  # of guesses
    adapters: AdapterBank | None = None


class SlotState:
    """Arrays indexed by slot. An admission clears its slot."""

    def __init__(self, limits: RunnerLimits, groups: tuple[CacheGroup, ...]) -> None:
        slots = limits.slots
        self.limits, self.groups = limits, groups  # those that have block tables
        self.max_len = limits.max_model_len
        self.stride = self.max_len + 1  # of ids: a last token has no next step, and goes to a place that is never read
        ids: IntArray | None = np.zeros((slots, self.stride), np.int32) if limits.host_memory else None
        self._host_ids = None if ids is None else ids.reshape(-1)  # pages that are never written cost nothing
        self.ids = (  # [slots, stride] int32
            torch.zeros((slots, self.stride), dtype=torch.int32, device=limits.device)
            if ids is None
            else torch.from_numpy(ids)
        )
        self._written: list[tuple[int, IntArray]] = []  # ids that the device has not been told: flat place, values
        self.num_prompt: IntArray = np.zeros(slots, np.int32)
        self.num_embedded: IntArray = np.zeros(slots, np.int32)  # first positions that have no ids
        self.adapters: LongArray | None = None if limits.adapters is None else np.zeros(slots, np.int64)  # their slots
        self.work: list[Work | None] = [None] * slots
        self.faults: dict[int, str] = {}  # slots whose request cannot run, and why
        blocks = [-(-self.max_len // group.block_size) for group in groups]
        self.tables: list[IntArray] = [np.zeros((slots, count), np.int32) for count in blocks]  # each [slots, blocks]
        self.num_blocks: IntArray = np.zeros((len(groups), slots), np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Follow the plan's releases, admissions and appended ids and blocks.

        Raises IndexError for a slot or a length that does not exist: the scheduler is broken, which is fatal.
        """
        for slot in plan.releases:
            self._clear(slot)
        for admit in plan.admits:
            self._admit(admit)
        for chunk in plan.chunks:
            self._append(chunk)

    def adapters_of(self, slots: LongArray) -> torch.Tensor:
        """Return the adapters' slots of requests, on the host; zeros where there is no bank."""
        return torch.from_numpy(np.zeros_like(slots) if self.adapters is None else self.adapters[slots])

    def num_added(self, slot: int) -> int:
        """Return how many tokens the adapter of a slot's request adds to the vocabulary."""
        bank = self.limits.adapters
        return 0 if bank is None or self.adapters is None else bank.num_added[self.adapters[slot]]

    def within(self, mask: bytes | None) -> bytes | None:
        """Return a mask without what stands behind the model's own vocabulary: no token there is allowed by it."""
        whole, rest = divmod(self.limits.vocab_size, 8)
        if mask is None or self.limits.adapters is None or not rest:
            return mask
        return mask[:whole] + bytes([mask[whole] & (1 << rest) - 1])

    def work_of(self, slot: int) -> Work:
        """Return the work that the slot's request asks for.

        Raises RuntimeError for a slot without one: the plan is broken.
        """
        work = self.work[slot]
        if work is None:
            raise RuntimeError(f"a plan runs slot {slot}, to which no request was admitted")
        return work

    def sampling_of(self, slot: int) -> TokenSampling:
        """Return the sampling of the slot's request.

        Raises RuntimeError for a slot without one, or a request to be pooled.
        """
        work = self.work_of(slot)
        if not isinstance(work, TokenSampling):
            raise RuntimeError(f"a plan samples slot {slot}, whose request is to be pooled")
        return work

    def take_written(self) -> list[torch.Tensor]:
        """Return flat places [n] int64 and values [n] int32 for `ids`, from the plans applied since the last call.

        Returns no tensors where there are none.
        """
        written, self._written = self._written, []
        if not written:
            return []
        places = np.concatenate([np.arange(place, place + len(values)) for place, values in written])
        return [torch.from_numpy(places), torch.from_numpy(np.concatenate([values for _, values in written]))]

    def put(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens [n] to flat places [n] int64 of `ids`, all on its device.

        Where that is the host, NumPy does it, in a fraction of torch's time.
        """
        if self._host_ids is not None:
            self._host_ids[places.numpy()] = tokens.numpy()
        else:
            self.ids.view(-1).index_copy_(0, places, tokens.to(torch.int32))

    def check(self) -> None:
        """Raise RuntimeError where a slot without a request holds something."""
        for slot, work in enumerate(self.work):
            in_use = int(self.num_prompt[slot]) + int(self.num_blocks[:, slot].sum())
            if work is None and (in_use or slot in self.faults):
                raise RuntimeError(f"slot {slot} is free but not empty")

    def _clear(self, slot: int) -> None:
        self.num_prompt[slot] = self.num_embedded[slot] = 0
        self.work[slot] = None
        self.faults.pop(slot, None)
        for group, table in enumerate(self.tables):
            table[slot, : int(self.num_blocks[group, slot])] = 0
            self.num_blocks[group, slot] = 0

    def _admit(self, admit: Admit) -> None:
        slot, known = admit.slot, admit.known_ids
        self._clear(slot)
        self.work[slot] = admit.work
        if self.adapters is not None:
            self.adapters[slot] = admit.adapter_slot
        self.num_prompt[slot] = admit.num_prompt
        self._write(slot, 0, known)
        self.num_embedded[slot] = sum(i.count for i in admit.media[:1] if i.kind == "embeds" and not i.start)

    def _append(self, chunk: Chunk) -> None:
        slot = chunk.slot
        if chunk.new_ids:
            self._write(slot, chunk.start + chunk.count - len(chunk.new_ids), chunk.new_ids)
        for group, blocks in enumerate(chunk.new_blocks):
            if blocks:
                start = int(self.num_blocks[group, slot])
                row = self.tables[group][slot]
                if start + len(blocks) > row.shape[0]:
                    raise IndexError(f"slot {slot} got more blocks than max_model_len needs")
                row[start : start + len(blocks)] = blocks
                self.num_blocks[group, slot] = start + len(blocks)

    def _write(self, slot: int, start: int, ids: tuple[int, ...]) -> None:
        if start + len(ids) > self.max_len:
            raise IndexError(f"slot {slot} got more ids than max_model_len")
        values = np.asarray(ids, dtype=np.int64)
        if len(ids) and (values.min() < 0 or values.max() >= self.limits.vocab_size + self.num_added(slot)):
            self.faults[slot] = "A token id is outside the vocabulary."  # this request's fault, no one else's
            values = np.zeros_like(values)
        self._written.append((slot * self.stride + start, values.astype(np.int32)))
