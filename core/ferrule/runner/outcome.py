"""The result of a step: small tensors from the device, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np
import torch

from ferrule.interfaces.executor import Step
from ferrule.interfaces.platform import Copies, Transfers
from ferrule.interfaces.sampler import Sampled
from ferrule.runner import logprobs
from ferrule.runner.draws import guesses_of
from ferrule.types import Chunk, RowResult, StepPlan, StepResult, StepSeconds, TokenLogprobs

_NOT_FINITE = "The model computed numbers that are not finite."
_BARRED = "No token is allowed here by all of what the request asks for: constraint, allowed and banned tokens."
_RANKED = 5  # tensors of `logprobs.rank`


@dataclass
class Outcome(Step):
    """A step whose launches are queued. Its result is read from `tensors`, in the order in which they were added.

    Everything else is known when the step begins: when the result is read, its slots may belong to other requests.
    """

    plan: StepPlan
    faults: dict[int, str]  # by row
    invalid: set[int] = field(default_factory=set)  # rows whose request is to blame for the fault
    tensors: list[torch.Tensor] = field(default_factory=list)
    seconds: Callable[[], StepSeconds] | None = None  # that it has taken when it is read, where steps are measured
    _copies: Copies | None = None  # of `tensors`, on their way to the host; None: nothing was computed
    _prompts: list[tuple[int, list[int]]] = field(default_factory=list)  # row, and what `tops` its entries have
    _pooled: dict[int, int] = field(default_factory=dict)  # by row: its place among the vectors
    _places: dict[int, int] = field(default_factory=dict)  # by row: its first place among the sampled ones
    _tokens: int = 0  # which of `tensors` are the tokens
    _bars: bool = False  # `barred` came with the tokens
    _errors: dict[int, str] = field(default_factory=dict)  # by place
    _asking: dict[int, int] = field(default_factory=dict)  # by place: how many likely tokens to list
    _guessed: Sequence[int] = ()  # rows of which the last of `tensors` has guesses

    def add_prompt(self, row: int, finite: torch.Tensor, ranked: list[torch.Tensor], top: int) -> None:
        """Add entries for some of a row's prompt positions; `finite` [] bool says whether they can be reported."""
        self._prompts.append((row, [top] * len(ranked[0])))
        self.tensors += finite, *ranked

    def add_vectors(self, rows: list[int], vectors: torch.Tensor) -> None:
        """Add the vectors [rows, size] float32 that `rows` are pooled to. Comes after `add_prompt`."""
        self._pooled = {row: place for place, row in enumerate(rows)}
        self.tensors.append(vectors)

    def add_tokens(self, rows: Sequence[int], sampled: Sampled) -> None:
        """Add a token for each of `rows`, in which one with guesses comes several times.

        Comes after prompts and vectors.
        """
        places = range(len(rows) - 1, -1, -1)
        self._places, self._errors = dict(zip(reversed(rows), places, strict=True)), dict(sampled.errors)
        self._tokens = len(self.tensors)
        self.tensors += sampled.tokens, sampled.finite
        if sampled.barred is not None:
            self._bars = True
            self.tensors.append(sampled.barred)

    def add_logprobs(self, asking: dict[int, int], ranked: list[torch.Tensor]) -> None:
        """Add logprobs of the tokens at some places. Comes after `add_tokens`."""
        self._asking = asking
        self.tensors += ranked

    def add_guesses(self, rows: Sequence[int], guesses: torch.Tensor, vocab_size: int) -> None:
        """Add guesses at what follows the tokens of `rows`: [rows, most] int64, up to the first that is not an id.

        Comes last.
        """
        self._guessed = rows
        self.tensors.append(guesses.masked_fill(guesses >= vocab_size, -1))

    def fetch(self, transfers: Transfers) -> None:
        """Begin to copy the tensors to the host, once all are added."""
        self._copies = transfers.fetch(self.tensors)

    def token_ids(self, row: int) -> Sequence[int]:
        """Return the tokens of a row of the plan that count. Waits for the step; may be called on any thread."""
        place = self._places.get(row)
        if place is None or self._copies is None:
            return ()
        told = [each.tolist() for each in self._copies.wait()[self._tokens : self._tokens + 2]]
        return self._counting(self.plan.chunks[row], place, *told)

    def _counting(self, chunk: Chunk, place: int, tokens: list[int], finite: list[bool]) -> tuple[int, ...]:
        """Return a row's token, and those after it while guesses are right.

        The next step meets an error after the first.
        """
        last = place
        for guess in guesses_of(chunk):
            if tokens[last] != guess or last + 1 in self._errors or not finite[last + 1]:
                break
            last += 1
        return tuple(tokens[place : last + 1])

    def done(self) -> bool:
        return self._copies is None or self._copies.done()

    def result(self) -> StepResult:
        took = iter([] if self._copies is None else self._copies.wait())
        prompts: dict[int, list[TokenLogprobs] | None] = {}  # None: not finite
        for row, tops in self._prompts:
            finite, entries = bool(next(took)), logprobs.describe(list(islice(took, _RANKED)), tops)
            before = prompts.setdefault(row, [])
            prompts[row] = before + entries if finite and before is not None else None
        vectors = next(took).numpy() if self._pooled else None
        told = [next(took).tolist() for _ in range(2 + self._bars)] if self._places else []
        described: dict[int, TokenLogprobs] = {}
        if self._asking:
            tops = list(self._asking.values())
            described = dict(zip(self._asking, logprobs.describe(list(islice(took, _RANKED)), tops), strict=True))
        guessed = dict(zip(self._guessed, next(took).tolist(), strict=True)) if self._guessed else {}
        rows = []
        for row, chunk in enumerate(self.plan.chunks):
            error, place = self.faults.get(row), self._places.get(row)
            answers, invalid = prompts.get(row, []), row in self.invalid
            if error is None and place is not None:
                error = self._errors.get(place)
                invalid = error is None and self._bars and told[2][place]
                if error is None and not told[1][place]:
                    error = _BARRED if invalid else _NOT_FINITE
            vector = None if vectors is None or row not in self._pooled else vectors[self._pooled[row]]
            if error is None and (answers is None or not (vector is None or np.isfinite(vector).all())):
                error = _NOT_FINITE
            if error is not None:
                rows.append(RowResult(id=chunk.id, epoch=chunk.epoch, error=error, invalid=invalid))
                continue
            ids = () if place is None else self._counting(chunk, place, told[0], told[1])
            rows.append(
                RowResult(
                    id=chunk.id,
                    epoch=chunk.epoch,
                    token_ids=ids,
                    drafts=tuple(takewhile((0).__le__, guessed.get(row, ()))),
                    logprobs=tuple([described[place + n] for n in range(len(ids))]) if place in described else (),
                    prompt_logprobs=tuple(answers or ()),
                    vector=None if vector is None else vector.tobytes(),
                )
            )
        return StepResult(self.plan.step, tuple(rows), self.seconds and self.seconds())
