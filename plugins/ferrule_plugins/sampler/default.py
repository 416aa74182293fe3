"""`default`: greedy or random choice, vectorised over the batch, each row as if it were alone."""

from __future__ import annotations

import torch

from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler, SampleRow
from ferrule_plugins.sampler import adjust
from ferrule_plugins.sampler.draw import draw
from ferrule_plugins.sampler.noise import uniform


class DefaultSampler(Sampler):
    """Order: grammar, allowed ids, bad words, min_tokens, bias, processors, penalties; then greedy, or temperature,
    min_p, top_k, top_p and inversion. Logprobs are those of the logits as the model gave them.

    What a request needs as tensors is made once and kept by slot.
    """

    def __init__(self, plugins: Plugins) -> None:
        super().__init__(plugins)
        self._prepared: dict[int, adjust.Prepared] = {}
        self._penalties = adjust.Penalties()

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        rows = batch.rows
        finite = torch.isfinite(logits.amax(-1))
        if not bool(finite.all()):
            logits[~finite] = 0.0
        asking = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        logprobs = logits[torch.tensor(asking, device=logits.device)].log_softmax(-1) if asking else None
        errors: dict[int, str] = {}
        if any(not row.sampling.plain or row.mask is not None for row in rows):
            errors = self._adjust(logits, batch)
            possible = torch.isfinite(logits.amax(-1))
            if not bool(possible.all()):
                logits[~possible] = 0.0
                finite = finite & possible
        return Sampled(self._choose(logits, batch), finite, logprobs, errors)

    def _choose(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        random = [index for index, row in enumerate(batch.rows) if not row.sampling.greedy]
        if not random:
            return logits.argmax(-1)
        chosen = [batch.rows[index] for index in random]
        samplings = [row.sampling for row in chosen]
        noise = uniform([row.sampling.seed for row in chosen], [row.position for row in chosen])
        numbers = torch.from_numpy(noise).to(logits.device)
        if len(random) == len(batch.rows):
            return draw(logits, samplings, numbers)
        where = torch.tensor(random, device=logits.device)
        tokens = logits.argmax(-1)
        tokens[where] = draw(logits[where], samplings, numbers)
        return tokens

    def _adjust(self, logits: torch.Tensor, batch: SampleBatch) -> dict[int, str]:
        """Change logits in place; return what went wrong, by row."""
        errors: dict[int, str] = {}
        for index, row in enumerate(batch.rows):
            if row.mask is not None:
                adjust.mask_grammar(logits[index], row.mask)
            if adjust.needs_row(row.sampling):
                history = batch.history[row.slot, : row.position]
                try:
                    logits[index] = adjust.adjust_row(logits[index], row, self._prepare(row, logits), history)
                except Exception as error:  # a plugin's code: this row's fault, no neighbour's
                    errors[index] = adjust.describe_failure(repr(row.sampling.processors), error)
        penalised = [index for index, row in enumerate(batch.rows) if adjust.needs_penalty(row.sampling)]
        if penalised:
            self._penalties.apply(logits, batch, penalised)
        return errors

    def _prepare(self, row: SampleRow, logits: torch.Tensor) -> adjust.Prepared:
        prepared = self._prepared.get(row.slot)
        if prepared is None or prepared.sampling is not row.sampling:
            prepared = adjust.prepare(row.sampling, self.plugins, logits.shape[1], logits.device)
            self._prepared[row.slot] = prepared
        return prepared
