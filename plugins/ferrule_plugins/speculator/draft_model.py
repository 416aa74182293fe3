"""`draft_model`: a small model says what a large one will say (Leviathan et al., 2023; Chen et al., 2023).

Its keys and values lie in the target's blocks. Prompts are computed with the target's chunks, and for as many tokens as
a step had at most; what was missed while no guesses were wanted is made up for when they are. Guesses are its likeliest
tokens, in as many passes over one token of each row. A row ends where the draft model thinks that all of its guesses
together are unlikely to be right, because the target would verify the next in vain.

After each pass the guesses are read on the host, which knows only then how far a row has come. On a CPU that is free; a
GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log
from typing import ClassVar

import torch
from torch import nn

from ferrule.errors import ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import ForwardContext, Generates, LayerCache, Model
from ferrule.interfaces.sampler import SamplerKernels
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule.types import Admit, Chunk
from ferrule_plugins.speculator.vocabularies import share_tokens

_LEAST_BUDGET = 256  # tokens of requests in a pass, where its step had fewer
_USUAL_CERTAINTY = 0.2
_FEW = 2  # tokens of a request, of which a pass is recorded with its head
_FRESH = -1  # entries of a request that has just been admitted


@dataclass
class _Row:
    """A row that is guessed for. `known` tokens are there without guesses."""

    slot: int
    known: int
    most: int  # guesses
    chance: float = 0.0  # logarithm of the chance that all guesses are right, as the draft model sees it
    guesses: list[int] = field(default_factory=list)


class Likeliest(nn.Module, Model):
    """A draft model that gives no hidden states but the likeliest next tokens, so that a recorded pass has its head.

    `forward` returns [tokens, 2] float32: an id, which is exact below 2²⁴, and the logarithm of its probability.
    """

    def __init__(self, model: Model, head: Generates, kernels: Kernels) -> None:
        super().__init__()
        self._inner, self._head = (model,), head  # in a tuple, so that torch registers no module twice
        part = kernels.part(SamplerKernels)
        self._surest = (part and part.surest) or surest

    def cache_specs(self) -> dict[str, LayerCache]:
        return self._inner[0].cache_specs()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return self._inner[0].load_weights(weights)

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.follow(self._inner[0].forward(ids, ctx))

    def follow(self, hidden: torch.Tensor) -> torch.Tensor:
        """Do the same for hidden states [tokens, hidden]."""
        return self._surest(self._head.logits(hidden))


class DraftModel(Speculator):
    """A speculator that asks a model with the same vocabulary, or with one that shares most tokens."""

    own_settings: ClassVar[tuple[str, ...]] = ("model", "revision", "quantization", "least_certainty")
    usual_tokens: ClassVar[int] = 5
    model_types: ClassVar[tuple[str, ...]] = ("*",)

    def __init__(self, context: SpeculatorContext) -> None:
        certainty = _certainty(context)
        self._certainty = log(certainty) if certainty else -inf
        draft = context.load(context.settings)
        self._model = draft.model
        self._likeliest = Likeliest(draft.model, _checked(draft.model, context), draft.build.kernels)
        sizes = context.build.config["vocab_size"], draft.build.config["vocab_size"]
        self._tokens = share_tokens(context.tokenizer(), draft.tokenizer(), sizes, draft.build.device)
        self._longest = draft.build.max_model_len
        self._device = draft.build.device
        self._written = [_FRESH] * context.num_slots  # positions of each slot that have the right entries
        self._known = [0] * context.num_slots  # tokens that a slot had when it was guessed for
        self._budget = _LEAST_BUDGET  # tokens of a pass

    def modules(self) -> Sequence[torch.nn.Module]:
        return [self._model] if isinstance(self._model, torch.nn.Module) else []

    def cache_specs(self) -> Mapping[str, LayerCache]:
        return self._model.cache_specs()

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self._written[admit.slot] = _FRESH

    def observe(self, chunks: Sequence[Chunk], hidden: torch.Tensor, steps: DraftSteps) -> None:
        """Compute the pieces of prompts; a prompt's last one is left to the guesses, if any are wanted.

        An entry that was written for a guess is right as long as the guess is.
        """
        self._budget = left = max(len(hidden), _LEAST_BUDGET)
        pieces = []
        for chunk in chunks:
            slot, end = chunk.slot, chunk.start + chunk.count
            certain = end - chunk.drafts
            written = self._written[slot]
            kept = end if self._known[slot] == certain else chunk.start
            self._written[slot] = written = chunk.start if written == _FRESH else min(written, kept)
            if not chunk.ends and (piece := self._piece(slot, min(certain, self._longest), left, steps)):
                pieces.append(piece)
                left -= piece[2]
        if pieces:
            self._forward(self._model, pieces, steps)

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        found, pieces, left = [], [], self._budget
        for slot, known, wanted in zip(rows.slots, rows.lengths.tolist(), rows.wanted, strict=True):
            room = min(steps.room(slot), self._longest)
            self._written[slot], self._known[slot] = min(self._written[slot], known - 1), known
            piece = self._piece(slot, min(known, room), left, steps)
            row = _Row(slot, known, 0)
            if piece is not None:
                pieces.append(piece)
                left -= piece[2]
                if self._written[slot] == known:
                    row.most = min(wanted, 1 + room - known)
            found.append(row)
        if pieces:
            ready = [number for number, (slot, *_) in enumerate(pieces) if self._written[slot] == self._known[slot]]
            ends = [*accumulate(count for *_, count in pieces)]
            short = ends[-1] <= _FEW * len(pieces)
            made = self._forward(self._likeliest if short else self._model, pieces, steps)
            if len(ready) < len(made):
                lasts = torch.tensor([ends[number] - 1 for number in ready], dtype=torch.int64, device=self._device)
                made = made.index_select(0, lasts)
            self._guess([row for row in found if row.most], made if short else self._likeliest.follow(made), steps)
        most = max(len(row.guesses) for row in found)
        guesses = [row.guesses + [-1] * (most - len(row.guesses)) for row in found]
        return torch.tensor(guesses, dtype=torch.int64, device=self._device).view(len(found), most)

    # ------------------------------------------------------------------------------------------------ passes

    def _piece(self, slot: int, end: int, most: int, steps: DraftSteps) -> tuple[int, int, int] | None:
        """Return slot, start and count of the next entries of a request to write, up to `end`; None for none."""
        start = max(self._written[slot], steps.first(slot))
        count = min(end - start, most)
        if count <= 0:
            return None
        self._written[slot] = start + count
        return slot, start, count

    def _forward(self, model: Model, pieces: Sequence[tuple[int, int, int]], steps: DraftSteps) -> torch.Tensor:
        """Compute known tokens of requests; return what the model makes of each."""
        slots, starts, counts = zip(*pieces, strict=True)
        ids = self._tokens.drafted(steps.ids(slots, starts, counts))
        return steps.forward(model, slots, starts, counts, ids)

    def _guess(self, rows: list[_Row], likeliest: torch.Tensor, steps: DraftSteps) -> None:
        """Add guesses to rows, given what `Likeliest` says behind their last tokens."""
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None
        while rows:
            going = []
            for place, (row, (id, chance)) in enumerate(zip(rows, likeliest.tolist(), strict=True)):
                told, row.chance = self._tokens.told(int(id)), row.chance + chance
                if told >= 0 and row.chance >= self._certainty:
                    row.guesses.append(told)
                    if len(row.guesses) < row.most:
                        going.append(place)
            ids = likeliest[:, 0].long()
            if len(going) < len(rows):
                rows, ids, forward = [rows[place] for place in going], ids[going], None
            if rows:
                forward = forward or self._ahead(rows, steps)
                for row in rows:
                    self._written[row.slot] = row.known + len(row.guesses)
                likeliest = forward(ids)

    def _ahead(self, rows: Sequence[_Row], steps: DraftSteps) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that computes the last guess of each row, for as long as all rows go on."""
        slots, starts = [row.slot for row in rows], [row.known + len(row.guesses) - 1 for row in rows]
        return steps.chain(self._likeliest, slots, starts, min(row.most - len(row.guesses) for row in rows))


def surest(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's likeliest token and the logarithm of its probability: [rows, 2] float32."""
    ids = logits.argmax(1, keepdim=True)
    return torch.cat((ids.float(), logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)), dim=1)


def _certainty(context: SpeculatorContext) -> float:
    """Return the least chance that all guesses of a row are right. Raises ConfigError."""
    value = context.settings.get("least_certainty", _USUAL_CERTAINTY)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"--speculative-config.least_certainty: {value!r:.80} is not a number from 0 to less than 1.")
    return float(value)


def _checked(model: Model, context: SpeculatorContext) -> Generates:
    """Return a draft model as one that generates. Raises ConfigError for one that cannot guess."""
    problem = None
    if not isinstance(model, Generates) or not model.splits_prompts:
        problem = "generates no text"
    elif model.state_specs():
        problem = "has recurrent states, which cannot be taken back where a guess was wrong"
    elif model.position_numbers != context.target.position_numbers:
        problem = "counts positions in another way than the target"
    if problem or not isinstance(model, Generates):
        raise ConfigError(f"--speculative-config.model {context.settings['model']}: {type(model).__name__} {problem}.")
    return model
