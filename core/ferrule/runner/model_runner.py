"""ModelRunner: a plan becomes tensors, a forward pass, and sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ferrule.interfaces.adapters import AdapterBank
from ferrule.interfaces.attention import AttentionBackend
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import Generates, Model, PoolRow, Pools
from ferrule.interfaces.platform import Recorder, StepInput, Transfers
from ferrule.interfaces.sampler import SampleBatch, Sampler, SampleRow
from ferrule.interfaces.speculator import Speculator
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.runner import logprobs
from ferrule.runner.cache import cache_of
from ferrule.runner.drafting import Drafting, DraftPasses, Sample
from ferrule.runner.draws import Draws
from ferrule.runner.grammars import Grammars, Masks, PendingMasks
from ferrule.runner.media import MediaStore, Positions
from ferrule.runner.outcome import Outcome
from ferrule.runner.replay import Replays
from ferrule.runner.state import LongArray, RunnerLimits, SlotState
from ferrule.runner.step import Bindings, Rows, StepContext, step_inputs
from ferrule.types import Chunk, Pooling, StepPlan, StepResult

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Forwarded:
    """A step between forward and finish: its hidden states [tokens, hidden], and where each row's are."""

    plan: StepPlan
    rows: Rows
    hidden: torch.Tensor
    masks: PendingMasks | None = None  # of the rows that are constrained, when they are there


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """The parts that a runner is made of.

    Without a recorder every step is launched; without grammars there are no constraints. `tokenizer` opens the model's,
    and is called when a logits processor asks for it. `draft_recorder` makes a recorder for a speculator's model.
    """

    model: Model
    attention: AttentionBackend
    sampler: Sampler
    limits: RunnerLimits
    transfers: Transfers = field(default_factory=Transfers)
    recorder: Recorder | None = None
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    grammars: Grammars | None = None
    speculator: Speculator | None = None
    draft_recorder: Callable[[], Recorder | None] = lambda: None
    adapters: AdapterBank | None = None
    kernels: Kernels = Kernels()
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor | None] = lambda shape, dtype: None  # None: by torch


class ModelRunner:
    """The runner, which executes plans in order. State of a request is keyed by its slot, never by its row in a batch.

    A step is `apply`, then `compute`, which queues its launches (forward, finish) and waits for nothing that the device
    computes. Not thread-safe: one thread runs all steps.
    """

    def __init__(self, parts: RunnerParts) -> None:
        model, attention, recorder = parts.model, parts.attention, parts.recorder
        self._model: Model | None = model
        self._allocate, self._kernels = parts.zeros, parts.kernels
        self._attention = attention
        self._sampler, self._transfers = parts.sampler, parts.transfers
        self._tokenizer, self._grammars = parts.tokenizer, parts.grammars
        speculator, self._adapters = parts.speculator, parts.adapters
        self._limits = limits = replace(parts.limits, embed_size=model.embed_size(), adapters=parts.adapters)
        self._revision = 0  # of the bank, for which steps are recorded
        self._position_numbers = model.position_numbers
        drafts = {} if speculator is None else speculator.cache_specs()
        self.cache, self.recurrent = cache_of(model, attention, limits, drafts)
        keeps = bool(self.cache.groups)  # else a step is never one token of each row
        alike = keeps and attention.recordable and all(place.spec.attended for place in self.cache.places.values())
        stateful = self.cache.paged != self.cache.groups
        recorder = recorder if alike and recorder and (recorder.stateful or not stateful) else None
        self._replays = Replays(recorder, attention, limits.max_model_len)
        passes = DraftPasses(self.cache, self._stage, parts.draft_recorder, limits.max_model_len)
        self._drafting = Drafting(speculator, passes, self._stage)
        self._storages: list[torch.Tensor] = []
        self.release_cache()

    @property
    def model(self) -> Model:
        if self._model is None:
            raise RuntimeError("the weights were given back")
        return self._model

    @property
    def speculator(self) -> Speculator | None:
        return self._drafting.speculator

    def use(self, model: Model | None, speculator: Speculator | None = None) -> None:
        """Continue with another copy of the same model, and of its speculator; None drops the present one."""
        self._forget()
        self._model = model
        self._drafting.use(speculator)

    def release_cache(self) -> None:
        """Free cache and states; forget every request."""
        self._forget()
        self._storages = []
        self.recurrent.release()
        self._state = SlotState(self._limits, self.cache.paged)
        self._media = MediaStore(self._limits)
        self._positions = Positions(self._limits.slots, self._position_numbers)
        self._bind()
        if self._grammars is not None:
            self._grammars.forget()

    def init_cache(self, num_blocks: int, num_snapshots: int = 0) -> None:
        """Allocate the KV cache, zeroed, block 0 being the null block, and states; forget every request."""
        self.release_cache()  # before the new one: both do not fit
        limits = self._limits
        element = limits.cache_type or limits.dtype
        self._storages = self.cache.allocate(num_blocks, element, self._zeros)
        self.recurrent.allocate(self._zeros, num_snapshots)
        self._bind()

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """The memory of cache and states."""
        return [*self._storages, *self.recurrent.all_tensors]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = self._allocate(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self._limits.device) if made is None else made

    def _bind(self) -> None:
        cache, storages = self.cache, self._storages
        views = cache.views(cache.places, storages)
        self._bound = Bindings(self._attention, cache.paged, cache.places, views, self.recurrent.tensors)
        self._drafting.passes.bind(self._state, self._positions, self._attention, storages)

    def _forget(self) -> None:
        """Drop the recordings, which read weights and cache at their present addresses."""
        self._replays.forget()
        self._drafting.passes.forget()

    @torch.inference_mode()
    def capture(self) -> bool:
        """Record what the device can replay, as far as start-up has time for it. Returns whether there is more."""
        return self._replays.warm(self._bound, self._inputs, self._compute)

    def check(self) -> None:
        """Raise RuntimeError where a free slot holds something, or the null block does."""
        self._state.check()
        if any(bool(storage[0].view(torch.uint8).count_nonzero()) for storage in self._storages):
            raise RuntimeError("the null block was written")

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. An exception is a fault of the device or of the planner, and is fatal."""
        self.apply(plan)
        return self.compute(plan).result()

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> Outcome:
        """Queue the chunks of a plan that was applied, or some of them. Steps end in the order in which they began."""
        if not plan.chunks:
            return Outcome(plan, {})
        outcome = self.finish(self.forward(plan))
        outcome.fetch(self._transfers)
        return outcome

    @torch.inference_mode()
    def apply(self, plan: StepPlan) -> None:
        """Follow the plan's differences: releases, admissions, appended blocks."""
        self._state.apply(plan)
        self._media.apply(plan)
        self._drafting.admit(plan.admits)
        self._positions.apply(plan, self.model)
        if self._grammars is not None:
            self._grammars.apply(plan.releases, plan.admits)
        if written := self._state.take_written():
            self._state.put(*self._stage(written))
        self.recurrent.begin(plan.admits, self._stage)

    def forward(self, plan: StepPlan) -> Forwarded:
        """Compute the hidden states of the plan's tokens, and write their keys, values and states."""
        plan = self.recurrent.rewind(plan)
        rows, masks = Rows.of(plan.chunks), self._begin_masks(plan)
        self._media.encode(plan.encodes, self.model)
        embeds = self._media.embeds(rows, self._stage, self._state.faults)
        self._follow_bank()
        steady = embeds is None and all(chunk.count == 1 + chunk.drafts for chunk in plan.chunks)
        hidden = self._replay(rows) if steady else None
        if hidden is None:
            inputs = self._stage([values for values, _ in self._inputs(rows)])
            contexts = tuple((rows.starts + rows.counts).tolist())
            hidden = self._compute(StepContext(self._bound, inputs, tuple(rows.counts.tolist()), contexts, embeds))
        self.recurrent.save(plan.chunks, self._stage)
        return Forwarded(plan, rows, hidden, masks)

    def finish(self, step: Forwarded) -> Outcome:
        """Compute what rows end with, write sampled tokens to the slots, and gather what the step will tell."""
        chunks, faults = step.plan.chunks, self._state.faults
        outcome = Outcome(
            step.plan, {row: faults[chunk.slot] for row, chunk in enumerate(chunks) if chunk.slot in faults}
        )
        for row, chunk in enumerate(chunks):
            if row not in outcome.faults and self._state.work_of(chunk.slot).prompt_logprobs is not None:
                self._add_prompt_logprobs(step, row, chunk, outcome)
        self._drafting.observe(chunks, step.hidden)
        pooled_rows = [row for row, chunk in enumerate(chunks) if chunk.ends == "pool"]
        if pooled_rows:
            outcome.add_vectors(pooled_rows, _pooled(self.model, step, pooled_rows, self._state))
        sampled_rows = [row for row, chunk in enumerate(chunks) if chunk.ends == "sample"]
        if sampled_rows:
            self._sample(step, sampled_rows, outcome)
            if self._grammars is not None:
                self._grammars.sampled([(row, chunks[row]) for row in sampled_rows], outcome)
        return outcome

    # ------------------------------------------------------------------------------------------ forward

    def _follow_bank(self) -> None:
        """Forget recorded steps where layers do something else for adapters since."""
        if self._adapters is not None and self._adapters.revision != self._revision:
            self._revision = self._adapters.revision
            self._forget()

    def _begin_masks(self, plan: StepPlan) -> PendingMasks | None:
        """Begin to make masks, which depend on tokens of the step before: this is done while the step computes."""
        if self._grammars is None:
            return None
        words = -(-self._limits.vocab_size // 32)
        return self._grammars.masks([chunk for chunk in plan.chunks if chunk.ends == "sample"], words)

    def _stage(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._transfers.stage(tensors, self._limits.device)

    def _compute(self, ctx: StepContext) -> torch.Tensor:
        """Run the model. Ids are read on the device, because the host may not know the newest."""
        ids = self._state.ids.view(-1).index_select(0, ctx.places).long()
        if self._adapters is None:
            return self.model.forward(ids, ctx)
        with _adapted(self._adapters, tokens=ctx.adapter_slots):
            return self.model.forward(ids, ctx)

    def _inputs(self, rows: Rows, longest: int | None = None) -> list[StepInput]:
        return step_inputs(rows, self._state, self._positions.of(rows), longest)

    def _replay(self, rows: Rows) -> torch.Tensor | None:
        """Return the hidden states of rows without prompts, or None where no such step is recorded."""
        keep = partial(self.recurrent.keep, rows.slots) if self.recurrent.tensors else None
        return self._replays.run(rows, self._bound, self._inputs, self._compute, keep)

    # ------------------------------------------------------------------------------------------ sampling

    def _logits(self, hidden: torch.Tensor, slots: LongArray) -> torch.Tensor:
        """Return the logits of hidden states [rows, hidden]; `slots` is their request, or each row's.

        They are wider than the vocabulary where adapters of these requests add tokens to it.
        """
        width = self._limits.vocab_size
        if self._adapters is None:
            return _logits(self.model, width, hidden)
        bank, own = self._adapters, self._state.adapters_of(slots)
        rows = self._stage([own])[0].expand(len(hidden))
        added = tuple(sorted({slot for slot in own.tolist() if bank.num_added[slot]})) if any(bank.num_added) else ()
        with _adapted(bank, rows=rows, added=added):
            return _logits(self.model, width + max((bank.num_added[slot] for slot in added), default=0), hidden)

    def _sample(self, step: Forwarded, rows: list[int], outcome: Outcome) -> None:
        state, chunks, draws = self._state, step.plan.chunks, Draws.of(step.plan.chunks, rows)
        slots, positions = step.rows.slots[draws.rows], (step.rows.starts + step.rows.counts)[draws.rows] - draws.back
        masks = Masks() if step.masks is None else step.masks.result()
        bad = masks.errors
        outcome.faults |= {row: bad[chunks[row].slot] for row in rows if chunks[row].slot in bad}
        outcome.invalid |= {row for row in rows if chunks[row].slot in masks.invalid}
        wanted = _sample_rows(slots, positions, draws.ahead, masks, state)
        asking = {place: top for place, row in enumerate(wanted) if (top := row.sampling.logprobs) is not None}
        behind = step.rows.last[draws.rows] - draws.back
        places = [torch.from_numpy(slots * state.stride + positions)]
        if len(wanted) < len(step.hidden):  # not each token is the last of a row that samples
            places.append(torch.from_numpy(behind))
        here, *last = self._stage(places)
        hidden = step.hidden.index_select(0, *last) if last else step.hidden
        logits = self._logits(hidden, slots)
        mode, typical = self._limits.logprobs_mode, self._limits.typical
        batch = SampleBatch(wanted, state.ids, self._transfers, self._tokenizer, mode, self._kernels, typical)
        if draws.guesses is None:
            sampled = self._sampler.sample(logits, batch)
        else:
            sampled = self._sampler.verify(logits, batch, *self._stage([draws.guesses]))
        state.put(here, sampled.tokens)  # where the next step looks for them
        outcome.add_tokens(draws.rows, sampled)
        ranked = sampled.ranked
        if asking and ranked is None and sampled.logprobs is not None:
            (who,) = self._stage([torch.tensor(list(asking))])
            chosen = sampled.tokens.index_select(0, who)
            ranked = logprobs.rank(sampled.logprobs, chosen, list(asking.values()))
        if ranked is not None:
            outcome.add_logprobs(asking, list(ranked))
        guesses = self._drafting.guesses(chunks, draws, Sample(positions, behind, step.hidden, sampled.tokens))
        if guesses is not None:
            outcome.add_guesses(*guesses, self._limits.vocab_size)

    # ------------------------------------------------------------------------------------ prompt logprobs

    def _add_prompt_logprobs(self, step: Forwarded, row: int, chunk: Chunk, outcome: Outcome) -> None:
        """Add an entry for each position p in (start, start + count] that is in the prompt."""
        stop = min(chunk.start + chunk.count, int(self._state.num_prompt[chunk.slot]) - 1)
        if stop <= chunk.start:
            return
        first = int(step.rows.last[row]) - chunk.count + 1
        hidden = step.hidden[first : first + stop - chunk.start]
        targets = self._state.ids[chunk.slot, chunk.start + 1 : stop + 1].long()
        top = self._state.sampling_of(chunk.slot).prompt_logprobs or 0
        mode, width = self._limits.logprobs_mode, self._limits.vocab_size + self._state.num_added(chunk.slot)
        logits = partial(self._logits, slots=step.rows.slots[row : row + 1])
        for finite, ranked in logprobs.rank_prompt(logits, hidden, targets, top, mode, width):
            outcome.add_prompt(row, finite, ranked, top)


def _logits(model: Model, width: int, hidden: torch.Tensor) -> torch.Tensor:
    if not isinstance(model, Generates):
        raise RuntimeError(f"a plan samples, and {type(model).__name__} has no logits")
    logits = model.logits(hidden)
    if logits.shape[1] != width:  # found at warm-up: no request can be behind it
        raise RuntimeError(f"the model has {logits.shape[1]} logits, but its vocab_size is {width}")
    return logits


def _sample_rows(
    slots: LongArray, positions: LongArray, ahead: list[int], masks: Masks, state: SlotState
) -> list[SampleRow]:
    """Return the rows of logits that a step samples from, each for a position of the request in its slot."""
    columns, rows = (slots, positions, state.num_prompt[slots], state.num_embedded[slots]), []
    for guesses, slot, position, num_prompt, num_embedded in zip(ahead, *(c.tolist() for c in columns), strict=True):
        mask = state.within(masks.of(slot, guesses))
        rows.append(SampleRow(slot, state.sampling_of(slot), num_prompt, position, mask, num_embedded))
    return rows


def _pooled(model: Model, step: Forwarded, rows: list[int], state: SlotState) -> torch.Tensor:
    """Return the vectors [rows, size] float32 of `rows`, whose prompts end in a step.

    Raises RuntimeError where the model, or a row's request, is not for vectors: the plan is broken.
    """
    if not isinstance(model, Pools):
        raise RuntimeError(f"a plan pools, and {type(model).__name__} does not")
    asked = []
    for row, first in zip(rows, step.rows.borders[rows].tolist(), strict=True):
        chunk = step.plan.chunks[row]
        work = state.work_of(chunk.slot)
        if not isinstance(work, Pooling):
            raise RuntimeError(f"a plan pools slot {chunk.slot}, whose request is to be sampled")
        asked.append(PoolRow(first=first, count=chunk.count, work=work))
    return model.pool(step.hidden, asked)


@contextmanager
def _adapted(
    bank: AdapterBank, tokens: torch.Tensor = _NONE, rows: torch.Tensor = _NONE, added: tuple[int, ...] = ()
) -> Iterator[None]:
    """Have adapters' slots for what is called here, and for nothing that is called later."""
    bank.token_slots, bank.row_slots, bank.row_added = tokens, rows, added
    try:
        yield
    finally:
        bank.token_slots = bank.row_slots = _NONE
        bank.row_added = ()
