"""A model under the real runner, as its kit looks at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ferrule.interfaces.model import Generates, Model
from ferrule.interfaces.sampler import SampleBatch, Sampled, Sampler
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.types import Admit, Chunk, Embeds, Pooling, StepPlan, TokenSampling, Work

BLOCK = 4
LENGTH = 64
SLOTS = 4


class Runner:
    """A model under the real runner, with the reference attention; `run` gives logits instead of tokens, or vectors."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        from ferrule_testkit.simulate import load

        limits = RunnerLimits(
            slots=SLOTS,
            max_model_len=LENGTH,
            vocab_size=vocab_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.splits = model.splits_prompts
        self._generates = isinstance(model, Generates)
        self._seen = _Seen()
        attention = load("attention", "torch_sdpa")()
        parts = RunnerParts(model=model, attention=attention, sampler=self._seen, limits=limits)
        self._runner = ModelRunner(parts)
        self._groups = sum(group.kind != "recurrent" for group in self._runner.cache.groups)
        self._runner.init_cache(1 + SLOTS * self._groups * (LENGTH // BLOCK))

    def run(
        self,
        prompts: Sequence[list[int]],
        cuts: Sequence[Sequence[int]],
        embeds: Mapping[int, Embeds] | None = None,
        pools: bool = False,
    ) -> list[list[torch.Tensor]]:
        """Logits [vocab] after each chunk of each prompt. The first chunks share a step, then the second ones, …

        `embeds` are those of prompts, by their number. Vectors of a model that does not generate, and with `pools`;
        prompts that are not split are computed whole.
        """
        given = embeds or {}
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        cuts = cuts if self.splits else [[len(ids)] for ids in prompts]
        work: Work = TokenSampling(seed=0, max_tokens=1, temperature=0.0)
        if pools or not self._generates:
            work = Pooling()
        admits = tuple(
            Admit(
                slot=n,
                id=f"r{n}",
                epoch=0,
                known_ids=tuple(ids),
                num_prompt=len(ids),
                work=work,
                embeds=given.get(n),
            )
            for n, ids in enumerate(prompts)
        )
        for step in range(max(map(len, cuts))):
            chunks = []
            for slot, cut in enumerate(cuts):
                if step < len(cut):
                    blocks = self._blocks(slot) if not step else ()
                    start = sum(cut[:step])
                    chunks.append(
                        Chunk(
                            slot=slot,
                            id=f"r{slot}",
                            epoch=0,
                            start=start,
                            count=cut[step],
                            ends=work.ends,
                            new_blocks=blocks,
                        )
                    )
            plan = StepPlan(step=step, chunks=tuple(chunks), admits=() if step else admits)
            rows = self._runner.execute(plan).rows
            vectors = [torch.frombuffer(bytearray(row.vector), dtype=torch.float32) for row in rows if row.vector]
            for chunk, answer in zip(chunks, vectors or self._seen.logits, strict=True):
                found[chunk.slot].append(answer)
        self._runner.execute(StepPlan(step=99, chunks=(), releases=tuple(range(len(prompts)))))
        self._runner.check()
        return found

    def _blocks(self, slot: int) -> tuple[tuple[int, ...], ...]:
        count = LENGTH // BLOCK
        first = [1 + (slot * self._groups + group) * count for group in range(self._groups)]
        return tuple(tuple(range(start, start + count)) for start in first)


class _Seen(Sampler):
    """Keeps the logits, and chooses what is known to come."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        self.logits = [row.clone() for row in logits]
        tokens = torch.tensor([int(batch.history[row.slot, row.position]) for row in batch.rows])
        return Sampled(tokens, torch.ones(len(tokens), dtype=torch.bool))
