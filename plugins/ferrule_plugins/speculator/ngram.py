"""`ngram`: what followed the last few tokens where they occurred before, in the prompt or the output.

Known as prompt lookup: it is right wherever an output copies from its prompt, as in editing, summaries, and code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule.types import Admit
from ferrule_plugins.speculator.grams import HashArray, IntArray, LongArray, News, Texts, guesses_of, hashes, number

_LONGEST = 32  # tokens of a run
_BITS = 20  # of a hash, at most: a table of a million places for each length
_LEAST_BITS = 16
_USUAL_MAX, _USUAL_MIN = 5, 2


class Ngram(Speculator):
    """The longest run of the last prompt_lookup_max to prompt_lookup_min tokens that occurred before, at its newest
    occurrence.

    A table for each length has the place of the newest run with a hash. Two runs may have one hash, so a place is
    compared with the tokens themselves; the one that came before is then not found.
    """

    own_settings = ("prompt_lookup_max", "prompt_lookup_min")
    usual_tokens = 8

    def __init__(self, context: SpeculatorContext) -> None:
        given = context.settings
        most = number(given, "prompt_lookup_max", _USUAL_MAX, 1, _LONGEST)
        least = number(given, "prompt_lookup_min", min(_USUAL_MIN, most), 1, _LONGEST)
        most = max(most, least) if "prompt_lookup_max" not in given else most
        if most < least:
            raise ConfigError(
                f"--speculative-config: prompt_lookup_max ({most}) must be at least prompt_lookup_min ({least})."
            )
        self._lengths: LongArray = np.arange(least, most + 1)
        self._back = np.arange(most)
        self._which = np.arange(len(self._lengths))  # tables
        self._texts = Texts(context.num_slots, front=most)
        self._keys: HashArray = np.random.default_rng(0).integers(1 << 63, size=context.num_slots, dtype=np.uint64)
        self._tables: IntArray = np.zeros((len(self._lengths), 0), np.int32)  # place of the newest run; 0: none
        self._bits = 0

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self._texts.forget(admit.slot)

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        texts = self._texts
        news = texts.follow(rows)
        if not self._bits:
            self._bits = min(_BITS, max(_LEAST_BITS, (2 * len(texts.cells)).bit_length()))
            self._tables = np.zeros((len(self._lengths), 1 << self._bits), np.int32)
        found = self._hashes(np.concatenate([news.places, news.ends]), np.concatenate([news.owners, news.slots]))
        count = len(news.places)
        self._tables[self._which, found[:count]] = news.places[:, None]
        return guesses_of(self._continued(news, found[count:], max(rows.wanted)), rows.lengths.device)

    def _hashes(self, places: LongArray, slots: LongArray) -> LongArray:
        """Return the hashes [places, lengths] of the runs that end at places."""
        windows = self._texts.cells[places[:, None] - self._back].astype(np.uint64)
        return hashes(windows, self._keys[slots], slice(int(self._lengths[0]) - 1, None), self._bits)

    def _continued(self, news: News, found: LongArray, count: int) -> LongArray:
        """Return the tokens [rows, count] that followed the longest run that each row ends with; -1: none."""
        cells, ends = self._texts.cells, news.ends
        places = self._tables[self._which, found].astype(np.int64)  # [rows, lengths]
        same = cells[places[:, :, None] - self._back] == cells[ends[:, None] - self._back][:, None]
        alike = np.logical_and.accumulate(same, axis=2).sum(axis=2)  # tokens that agree, from the last one back
        own = (self._texts.slot_of(places) == news.slots[:, None]) & (places < ends[:, None])
        fits = own & (alike >= self._lengths)
        if not fits.any():
            return np.full((len(ends), 1), -1)
        best = fits.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)
        rows = np.arange(len(ends))
        start, known = places[rows, best], fits[rows, best]
        # Where what followed reaches the end, it is taken to repeat.
        offsets = np.arange(count) % np.maximum(ends - start, 1)[:, None]
        return np.where(known[:, None], cells[start[:, None] + 1 + offsets].astype(np.int64) - 1, -1)
