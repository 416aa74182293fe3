"""Items of prompts that are not tokens: their embeddings, by digest, and where in the slots they stand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ferrule.interfaces.model import InputEmbeds, Model
from ferrule.runner.cache import Stage
from ferrule.runner.state import LongArray, RunnerLimits
from ferrule.runner.step import Rows
from ferrule.types import HostTensor, MediaItem, StepPlan

_UNFIT = "The prompt's embeddings do not fit the model."
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


class MediaStore:
    """The media of running requests, as plans bring, use and drop them."""

    def __init__(self, limits: RunnerLimits) -> None:
        self._size = limits.embed_size
        self._items: dict[int, tuple[MediaItem, ...]] = {}  # by slot, until they are computed
        self._outputs: dict[bytes, torch.Tensor | None] = {}  # [count, size]; those of clients on the host; None: unfit

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            self._items.pop(slot, None)
        for admit in plan.admits:
            self._items.pop(admit.slot, None)
            if admit.media:
                self._items[admit.slot] = admit.media
        for chunk in plan.chunks if self._items else ():
            items = self._items.get(chunk.slot)
            if items and items[-1].start + items[-1].count <= chunk.start:
                del self._items[chunk.slot]
        for digest in plan.forgets:
            self._outputs.pop(digest, None)

    def encode(self, items: Sequence[MediaItem], model: Model) -> None:
        """Compute the embeddings of these items, unless they are there already, as in a step that is computed again."""
        fresh = [item for item in items if item.digest not in self._outputs]
        self._outputs |= {item.digest: self._opened(item) for item in fresh if item.kind == "embeds"}
        others = [item for item in fresh if item.kind != "embeds"]
        if others:
            found = model.encode(others)
            shapes = [tuple(output.shape) for output in found]
            if shapes != [(item.count, self._size) for item in others]:
                raise RuntimeError(f"{type(model).__name__}.encode returned {shapes} for {len(others)} items")
            self._outputs |= {item.digest: output for item, output in zip(others, found, strict=True)}

    def embeds(self, rows: Rows, stage: Stage, faults: dict[int, str]) -> InputEmbeds | None:
        """Return the embeddings of a step's tokens, or None without media.

        Slots whose items are unfit go to `faults`.
        """
        tokens, parts = [], []
        if self._items:
            for slot, start, count, first in rows.spans():
                for item in self._items.get(slot, ()):
                    begin, end = max(start, item.start), min(start + count, item.start + item.count)
                    output = self._outputs.get(item.digest)
                    if begin < end and output is None:
                        faults[slot] = _UNFIT
                    elif begin < end and output is not None:
                        tokens.append(torch.arange(first + begin - start, first + end - start))
                        parts.append((output[begin - item.start : end - item.start], item.kind == "embeds"))
        if not parts:
            return None
        places, *sent = stage([torch.cat(tokens), *(part for part, given in parts if given)])
        there = iter(sent)
        return InputEmbeds(places, torch.cat([next(there) if given else part for part, given in parts]))

    def _opened(self, item: MediaItem) -> torch.Tensor | None:
        try:
            given: HostTensor = item.data["embeds"]
            return torch.frombuffer(bytearray(given.data), dtype=_TYPES[given.dtype]).view(item.count, self._size)
        except (KeyError, ValueError, RuntimeError):
            return None


class Positions:
    """The positions of tokens as the model sees them: their index, unless it chooses others for a prompt with media."""

    def __init__(self, slots: int, numbers: int) -> None:
        self._numbers = numbers  # of a token
        self._prompts: dict[int, LongArray] = {}  # by slot: [numbers, prompt tokens]
        self._shifts: LongArray = np.zeros(slots, np.int64)  # what tokens behind the prompt add to their index

    def apply(self, plan: StepPlan, model: Model) -> None:
        for slot in (*plan.releases, *(admit.slot for admit in plan.admits)):
            if self._prompts.pop(slot, None) is not None:
                self._shifts[slot] = 0
        for admit in plan.admits:
            found = model.positions(admit.num_prompt, admit.media) if admit.media else None
            if found is not None:
                self._prompts[admit.slot] = found
                self._shifts[admit.slot] = int(found.max()) + 1 - admit.num_prompt

    def of(self, rows: Rows) -> LongArray:
        """Return positions [tokens], or [tokens, numbers] for a model with several per token."""
        if self._numbers == 1 and not self._prompts:
            return rows.positions
        found: LongArray = np.repeat(rows.positions[:, None], self._numbers, 1)
        if self._prompts:
            found += self._shifts[rows.token_slots][:, None]
            for slot, start, count, first in rows.spans():
                if slot in self._prompts:
                    part = self._prompts[slot][:, start : start + count]
                    found[first : first + part.shape[1]] = part.T
        return found if self._numbers > 1 else found[:, 0]
