"""Rehearsals: the model says exactly what it is told to, so that a client can be tried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferrule.interfaces.sampler import LogitsProcessor

if TYPE_CHECKING:
    import torch


class Rehearsal(LogitsProcessor):
    """A processor that makes the model say `ids`, one after the other; beyond them the model is free."""

    conformance = "acme_protocol.conformance:REHEARSAL"

    def __init__(self, **kwargs: Any) -> None:
        ids = kwargs.pop("ids", None)
        if kwargs or not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise ValueError("a rehearsal takes ids, a list of tokens")
        self._ids: list[int] = ids

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        said = len(known_ids) - num_prompt
        if said < len(self._ids):
            kept = logits[self._ids[said]].clone()
            logits.fill_(float("-inf"))
            logits[self._ids[said]] = kept
        return logits
