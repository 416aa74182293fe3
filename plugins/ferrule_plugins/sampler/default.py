"""`default`: greedy or random choice, vectorised over the batch, each row as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.sampler import Chooser, LogprobsMode, SampleBatch, Sampled, Sampler, SampleRow
from ferrule_plugins.sampler import adjust, chooser
from ferrule_plugins.sampler.plan import Parcel, Plan
from ferrule_plugins.sampler.told import Told
from ferrule_plugins.sampler.typical import Typical

Change = Callable[[Chooser, torch.Tensor], None]


class DefaultSampler(Sampler):
    """A sampler that treats each row as if it were alone, and reports logprobs in each of the modes.

    It applies, in order: grammar, allowed ids, bad words, min_tokens, bias, processors, penalties; then a greedy
    choice, or temperature, min_p, top_k, top_p and inversion.

    What a request needs as arrays is made once and kept by slot; what a batch needs, for as long as its parameters
    stay. All of it goes to the device in one copy, and the device is waited for only where a request has a logits
    processor.
    """

    logprobs_modes = frozenset(LogprobsMode)
    accepts_typical = True

    def __init__(self, plugins: Plugins) -> None:
        super().__init__(plugins)
        self._prepared: dict[int, adjust.Prepared] = {}
        self._chooser: Chooser | None = None
        self._plan = Plan(())

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        return self._drawn(logits, batch, None)

    def verify(self, logits: torch.Tensor, batch: SampleBatch, guesses: torch.Tensor) -> Sampled:
        return self.sample(logits, batch) if batch.typical is None else self._drawn(logits, batch, guesses)

    def _drawn(self, logits: torch.Tensor, batch: SampleBatch, guesses: torch.Tensor | None) -> Sampled:
        """Draw tokens; with `guesses` [rows], these hold where they are likely enough."""
        logits, rows, parcel = logits.contiguous(), batch.rows, Parcel()
        if self._chooser is None:
            self._chooser = chooser.chooser(batch.kernels)
            self._chooser.warm(logits, batch.history)
        plan, choose = self._follow(rows), self._chooser
        errors: dict[int, str] = {}
        draws = plan.draws(rows, parcel)
        told = Told(choose, plan, batch.logprobs_mode, parcel) if plan.asking else None
        lenient = None
        if guesses is not None and batch.typical is not None and draws is not None:
            lenient = Typical(batch.typical, plan, parcel)
        changes = [*self._edits(plan, batch, logits.shape[1], parcel, errors), *self._penalties(plan, batch, parcel)]
        parcel.send(batch.transfers, logits.device)
        best = choose.best(logits)
        finite, barred = best.finite, None
        if told is not None:
            told.see_raw(logits, kept=not changes and draws is None)
        if changes:
            for change in changes:
                change(choose, logits)
            best = choose.best(logits)
            barred = finite & (best.most == -math.inf)
            finite = finite & best.finite
        if told is not None:
            told.see_processed(logits)
        if lenient is not None:
            lenient.see(logits)
        tokens = best.tokens if draws is None else choose.draw(logits, best, draws)
        if lenient is not None and guesses is not None:
            tokens = lenient.accept(tokens, guesses)
        return Sampled(tokens, finite, None, errors, None if told is None else told.of(tokens), barred)

    def _follow(self, rows: Sequence[SampleRow]) -> Plan:
        samplings = [row.sampling for row in rows]
        if samplings != self._plan.samplings:
            self._plan = Plan(samplings)
        return self._plan

    def _edits(
        self, plan: Plan, batch: SampleBatch, vocab: int, parcel: Parcel, errors: dict[int, str]
    ) -> Iterator[Change]:
        """Yield the changes by masks, banned words, bans and biases, and processors.

        Failures go to `errors`, by row.
        """
        masks, edits, words = adjust.Masks(), adjust.Edits(), adjust.BadWords()
        processed: list[tuple[int, adjust.Prepared]] = []
        for index, row in enumerate(batch.rows):
            if row.mask is not None:
                masks.add(index, np.frombuffer(row.mask, dtype=np.uint8))
        for index in plan.edited:
            row = batch.rows[index]
            try:
                prepared = self._prepare(row, vocab, batch.tokenizer)
            except adjust.Failed as error:
                errors[index] = str(error)
                continue
            if prepared.allowed is not None:
                masks.add(index, prepared.allowed)
            words.add(index, row, prepared, (vocab, batch.history.stride(0)))
            edits.add(index, prepared, vocab, row.position - row.num_prompt < row.sampling.min_tokens)
            if prepared.processors:
                processed.append((index, prepared))
        if masks.rows:
            marked, bits = masks.put(vocab, parcel)
            yield lambda choose, logits: choose.mask(logits, marked(), bits())
        if words.words:
            table = words.put(parcel)
            yield lambda _, logits: adjust.ban_words(logits, batch.history, table())
        if edits.places:
            places, values = edits.put(parcel)
            yield lambda _, logits: adjust.add(logits, places(), values())
        for index, prepared in processed:
            yield partial(_process, batch=batch, index=index, prepared=prepared, errors=errors)

    def _penalties(self, plan: Plan, batch: SampleBatch, parcel: Parcel) -> Iterator[Change]:
        penalised = plan.penalties(batch.rows, parcel)
        if penalised is not None:
            yield lambda choose, logits: choose.penalise(logits, batch.history, penalised)

    def _prepare(self, row: SampleRow, vocab: int, tokenizer: adjust.OpenTokenizer) -> adjust.Prepared:
        prepared = self._prepared.get(row.slot)
        if prepared is None or prepared.sampling is not row.sampling:
            prepared = adjust.prepare(row.sampling, self.plugins, vocab, tokenizer)
            self._prepared[row.slot] = prepared
        return prepared


def _process(
    _: Chooser,
    logits: torch.Tensor,
    batch: SampleBatch,
    index: int,
    prepared: adjust.Prepared,
    errors: dict[int, str],
) -> None:
    row = batch.rows[index]
    try:
        logits[index] = adjust.process(logits[index], row, prepared, batch.history[row.slot, : row.position])
    except adjust.Failed as error:
        errors[index] = str(error)
