"""What a step brings back from the device: small tensors, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from ferrule.interfaces.executor import Step
from ferrule.interfaces.platform import Copies, Transfers
from ferrule.interfaces.sampler import Sampled
from ferrule.runner import logprobs
from ferrule.types import RowResult, StepPlan, StepResult, TokenLogprobs

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
    _copies: Copies | None = None  # of `tensors`, on their way to the host; None: nothing was computed
    _prompts: list[tuple[int, list[int]]] = field(default_factory=list)  # row, and what `tops` its entries have
    _pooled: dict[int, int] = field(default_factory=dict)  # by row: its place among the vectors
    _places: dict[int, int] = field(default_factory=dict)  # by row: its place among the sampled ones
    _tokens: int = 0  # which of `tensors` are the tokens
    _bars: bool = False  # `barred` came with the tokens
    _errors: dict[int, str] = field(default_factory=dict)  # by place
    _asking: dict[int, int] = field(default_factory=dict)  # by place: how many likely tokens to list

    def add_prompt(self, row: int, finite: torch.Tensor, ranked: list[torch.Tensor], top: int) -> None:
        """Entries of some of a row's prompt positions; `finite` [] bool says whether they can be told."""
        self._prompts.append((row, [top] * len(ranked[0])))
        self.tensors += finite, *ranked

    def add_vectors(self, rows: list[int], vectors: torch.Tensor) -> None:
        """The vectors [rows, size] float32 that `rows` are pooled to. Comes behind the prompts."""
        self._pooled = {row: place for place, row in enumerate(rows)}
        self.tensors.append(vectors)

    def add_tokens(self, rows: list[int], sampled: Sampled) -> None:
        """One token for each of `rows`. Comes behind the prompts and vectors."""
        self._places, self._errors = {row: place for place, row in enumerate(rows)}, dict(sampled.errors)
        self._tokens = len(self.tensors)
        self.tensors += sampled.tokens, sampled.finite
        if sampled.barred is not None:
            self._bars = True
            self.tensors.append(sampled.barred)

    def add_logprobs(self, asking: dict[int, int], ranked: list[torch.Tensor]) -> None:
        """Of the tokens at some places. Comes last."""
        self._asking = asking
        self.tensors += ranked

    def fetch(self, transfers: Transfers) -> None:
        """All tensors were added: begin to copy them to the host."""
        self._copies = transfers.fetch(self.tensors)

    def token(self, row: int) -> int | None:
        """The token of a row of the plan, None without one. Waits for the step; from any thread."""
        place = self._places.get(row)
        if place is None or self._copies is None:
            return None
        return int(self._copies.wait()[self._tokens][place])

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
            described = dict(zip(self._asking, logprobs.describe(list(took), tops), strict=True))
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
            ids = () if place is None else (told[0][place],)
            extra = (described[place],) if place in described else ()
            rows.append(
                RowResult(
                    id=chunk.id,
                    epoch=chunk.epoch,
                    token_ids=ids,
                    logprobs=extra,
                    prompt_logprobs=tuple(answers or ()),
                    vector=None if vector is None else vector.tobytes(),
                )
            )
        return StepResult(self.plan.step, tuple(rows))
