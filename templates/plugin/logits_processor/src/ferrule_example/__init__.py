"""The answer begins with given token ids, and the model goes on by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ferrule.interfaces.sampler import LogitsProcessor

MOST = 4096  # ids in a request


class ExampleProcessor(LogitsProcessor):
    """A processor that makes the answer begin with `ids`, a list of token ids."""

    conformance: ClassVar[dict[str, Any]] = {
        "arguments": ({"ids": [3, 5]}, {"ids": [0]}),
        "wrong": ({}, {"ids": []}, {"ids": "35"}, {"ids": [-1]}, {"ids": [True]}, {"ids": [1.5]}, {"text": "x"}),
    }

    def __init__(self, **kwargs: Any) -> None:
        if set(kwargs) != {"ids"}:
            raise ValueError("it takes one argument, 'ids'")
        ids = kwargs["ids"]
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError("'ids' must be a list of token ids")
        if not 0 < len(ids) <= MOST:
            raise ValueError(f"'ids' must have 1 to {MOST} entries")
        self._ids = ids

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        place = len(known_ids) - num_prompt
        if place >= len(self._ids):
            return logits
        token = self._ids[place]
        if token >= len(logits):
            raise ValueError(f"there is no token {token}")
        forced = torch.full_like(logits, float("-inf"))
        forced[token] = 0.0
        return forced
