"""ModelRunner: a plan becomes tensors, a forward pass, and sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.model import Model
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler, SampleRow
from ferrule.runner import logprobs
from ferrule.runner.cache import CacheMap, StateStore, map_layers
from ferrule.runner.state import SlotState
from ferrule.runner.step import Rows, StepContext
from ferrule.types import Chunk, RowResult, StepPlan, StepResult, TokenLogprobs, TokenSampling

_NOT_FINITE = "The model computed numbers that are not finite, or no token is allowed."


@dataclass(frozen=True, kw_only=True)
class RunnerLimits:
    """`vocab_size` is the logits' width; `max_model_len` is in tokens."""

    slots: int
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Forwarded:
    """A step between forward and finish: hidden states [tokens, hidden], and where each row's are."""

    plan: StepPlan
    rows: Rows
    hidden: torch.Tensor


class ModelRunner:
    """Runs plans in order. State of a request is keyed by its slot, never by its row in a batch.

    `execute` is apply, forward, finish. Not thread-safe: one thread runs all steps.
    """

    def __init__(self, model: Model, attention: AttentionBackend, sampler: Sampler, limits: RunnerLimits) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._limits = limits
        states = model.state_specs()
        self.cache: CacheMap = map_layers(model.cache_specs(), attention.cache_shape, len(states))
        self.recurrent = StateStore(states, limits.slots, limits.dtype, limits.device)
        self._storages: list[torch.Tensor] = []
        self._views: dict[str, torch.Tensor] = {}
        self._state = self._new_state()

    def _new_state(self) -> SlotState:
        limits = self._limits
        return SlotState(limits.slots, limits.max_model_len, self.cache.paged, limits.vocab_size, limits.device)

    def init_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache, zeroed, block 0 being the null block; forget every request."""
        self._views, self._storages = {}, []  # before the new ones: both do not fit
        self._storages, self._views = self.cache.allocate(
            num_blocks, self._limits.dtype, self._limits.device, self._attention.cache_shape
        )
        self.recurrent.allocate()
        self._state = self._new_state()

    def capture(self) -> None:
        """Record what the device can replay. CPUs have nothing to record."""

    def check(self) -> None:
        """Raise RuntimeError where a free slot holds something, or the null block does."""
        self._state.check()
        if any(bool(storage[0].count_nonzero()) for storage in self._storages):
            raise RuntimeError("the null block was written")

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. An exception is a fault of the device or of the planner, and is fatal."""
        self.apply(plan)
        if not plan.chunks:
            return StepResult(plan.step, ())
        return self.finish(self.forward(plan))

    def apply(self, plan: StepPlan) -> None:
        """Follow the plan's differences: releases, admissions, copies, appended blocks."""
        self._state.apply(plan)
        self.recurrent.clear([admit.slot for admit in plan.admits])
        for group, source, target in plan.copies:
            layers = self.cache.groups[group].num_layers
            for storage in self._storages[:layers]:
                storage[target].copy_(storage[source])

    def forward(self, plan: StepPlan) -> Forwarded:
        """Compute the hidden states of the plan's tokens, and write their keys and values."""
        rows = Rows.of(plan.chunks)
        ctx = StepContext(rows, self._state, self._attention, self.cache.places, self._views)
        ctx.prepare(self.cache.paged, self.recurrent.tensors)
        return Forwarded(plan, rows, self._model.forward(ctx.ids(), ctx))

    def finish(self, step: Forwarded) -> StepResult:
        """Sample the rows that ask for it, write their tokens to the slots, and describe the step."""
        chunks, faults = step.plan.chunks, self._state.faults
        sampled_rows = [row for row, chunk in enumerate(chunks) if chunk.samples]
        results: dict[int, RowResult] = {}
        if sampled_rows:
            results = self._sample(step, sampled_rows)
        rows = []
        for row, chunk in enumerate(chunks):
            result = results.get(row) or RowResult(chunk.id, chunk.epoch)
            if chunk.slot in faults:
                result = RowResult(chunk.id, chunk.epoch, error=faults[chunk.slot])
            elif result.error is None and self._sampling(chunk).prompt_logprobs is not None:
                result = self._with_prompt_logprobs(step, row, chunk, result)
            rows.append(result)
        return StepResult(step.plan.step, tuple(rows))

    # ------------------------------------------------------------------------------------------ sampling

    def _sampling(self, chunk: Chunk) -> TokenSampling:
        sampling = self._state.sampling[chunk.slot]
        if sampling is None:
            raise RuntimeError(f"a plan runs slot {chunk.slot}, which nobody was admitted to")
        return sampling

    def _sample(self, step: Forwarded, rows: list[int]) -> dict[int, RowResult]:
        chunks, device = step.plan.chunks, step.hidden.device
        last = torch.from_numpy(step.rows.last[np.array(rows)]).to(device)
        logits = self._model.logits(step.hidden.index_select(0, last))
        if logits.shape[1] != self._limits.vocab_size:  # found at warm-up: no request can be behind it
            raise RuntimeError(
                f"the model has {logits.shape[1]} logits, but its vocab_size is {self._limits.vocab_size}"
            )
        wanted = [
            SampleRow(
                slot=chunk.slot,
                sampling=self._sampling(chunk),
                num_prompt=int(self._state.num_prompt[chunk.slot]),
                position=chunk.start + chunk.count,
                mask=step.plan.masks.get(chunk.slot),
            )
            for chunk in (chunks[row] for row in rows)
        ]
        sampled = self._sampler.sample(logits, SampleBatch(wanted, self._state.ids))
        self._write_back(wanted, sampled.tokens)
        return self._describe([chunks[row] for row in rows], rows, wanted, sampled)

    def _write_back(self, wanted: list[SampleRow], tokens: torch.Tensor) -> None:
        """Put each token where the next step looks for it, on the device. The last position has no next step."""
        inside = [index for index, row in enumerate(wanted) if row.position < self._limits.max_model_len]
        if not inside:
            return
        places = [wanted[index].slot * self._limits.max_model_len + wanted[index].position for index in inside]
        ids = self._state.ids
        chosen = tokens if len(inside) == len(wanted) else tokens[torch.tensor(inside, device=ids.device)]
        ids.view(-1).index_copy_(0, torch.tensor(places, device=ids.device), chosen.to(torch.int32))
        for index in inside:
            self._state.sampled(wanted[index].slot, wanted[index].position)

    def _describe(
        self, chunks: list[Chunk], rows: list[int], wanted: list[SampleRow], sampled: Sampled
    ) -> dict[int, RowResult]:
        asking = [index for index, row in enumerate(wanted) if row.sampling.logprobs is not None]
        described: dict[int, TokenLogprobs] = {}
        if asking and sampled.logprobs is not None:
            tops = [wanted[index].sampling.logprobs or 0 for index in asking]
            chosen = sampled.tokens[torch.tensor(asking, device=sampled.tokens.device)]
            described = dict(zip(asking, logprobs.describe(sampled.logprobs, chosen, tops), strict=True))
        tokens, finite = sampled.tokens.tolist(), sampled.finite.tolist()
        results = {}
        for index, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            error = sampled.errors.get(index) or (None if finite[index] else _NOT_FINITE)
            if error is not None:
                results[row] = RowResult(chunk.id, chunk.epoch, error=error)
            else:
                extra = (described[index],) if index in described else ()
                results[row] = RowResult(chunk.id, chunk.epoch, (tokens[index],), extra)
        return results

    # ------------------------------------------------------------------------------------ prompt logprobs

    def _with_prompt_logprobs(self, step: Forwarded, row: int, chunk: Chunk, result: RowResult) -> RowResult:
        """Add an entry for each position p in (start, start + count] that is in the prompt."""
        stop = min(chunk.start + chunk.count, int(self._state.num_prompt[chunk.slot]) - 1)
        if stop <= chunk.start:
            return result
        first = int(step.rows.last[row]) - chunk.count + 1
        hidden = step.hidden[first : first + stop - chunk.start]
        targets = self._state.ids[chunk.slot, chunk.start + 1 : stop + 1].long()
        entries: list[TokenLogprobs] = []
        for piece, chosen in self._pieces(hidden, targets):
            values = self._model.logits(piece).log_softmax(-1)
            if not bool(torch.isfinite(values.amax(-1)).all()):
                return RowResult(chunk.id, chunk.epoch, error=_NOT_FINITE)
            top = self._sampling(chunk).prompt_logprobs or 0
            entries += logprobs.describe(values, chosen, [top] * len(chosen))
        return RowResult(chunk.id, chunk.epoch, result.token_ids, result.logprobs, tuple(entries))

    def _pieces(self, hidden: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Few enough rows at a time that their logits stay within a bound of memory."""
        size = max(1, logprobs.CHUNK_ELEMENTS // self._limits.vocab_size)
        return zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
