"""`suffix`: what followed the longest run of last tokens, in the request's own text or in what others were told.

The method is SuffixDecoding (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", 2024): agents and batches of alike requests say again and again what was said before. Where the paper
walks a suffix tree, whose nodes count, here the newest places of a run are looked up and compared; so memory is bounded
by a number of tokens, and there is no loop over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ferrule.interfaces.speculator import DraftSteps, KnownRows, Speculator, SpeculatorContext
from ferrule.types import Admit
from ferrule_plugins.speculator.grams import HashArray, IntArray, LongArray, News, Texts, guesses_of, hashes, number

_RUNS = (2, 4, 8)  # lengths of runs that are looked up
_BACK = np.arange(_RUNS[-1])
_COLUMNS = [length - 1 for length in _RUNS]
_NEWEST = 4  # places of each that are compared
_KEPT_TOKENS = 1 << 20  # of past outputs
_BITS = 20
_CONTEXT = 24  # tokens of a prompt that are kept with its output

_FRONT = 64  # zeros before all texts: as far back as runs are compared


class Suffix(Speculator):
    """The likeliest continuation of the longest run of last tokens, among the newest places where that run occurred.

    A place counts for a request of the same scope only: its own text, texts of others that run, and past outputs.
    """

    own_settings = (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    )
    usual_tokens = 16

    def __init__(self, context: SpeculatorContext) -> None:
        given = context.settings
        self._depth: int = number(given, "suffix_decoding_max_tree_depth", 24, 2, _FRONT)
        self._most_kept: int = number(given, "suffix_decoding_max_cached_requests", 10_000, 0, 1 << 20)
        self._factor: float = number(given, "suffix_decoding_max_spec_factor", 1.0, 0.01, 64)
        self._least_chance: float = number(given, "suffix_decoding_min_token_prob", 0.1, 0, 1)
        self._texts = Texts(context.num_slots, _FRONT, _KEPT_TOKENS if self._most_kept else 0)
        self._scopes: HashArray = np.zeros(context.num_slots, np.uint64)
        self._prompts: LongArray = np.zeros(context.num_slots, np.int64)  # their lengths
        self._kept: deque[tuple[int, int]] = deque()  # past outputs: first cell, and the 0 behind the last
        self._kept_scopes: HashArray = np.zeros(_KEPT_TOKENS if self._most_kept else 0, np.uint64)  # by spare cell
        self._next = 0  # spare cell for the next output
        self._heads: IntArray = np.zeros((len(_RUNS), 1 << _BITS), np.int32)  # the newest place of a hash; 0: none
        self._earlier: IntArray = np.zeros((len(_RUNS), 0), np.int32)  # by place: the one before with the same hash

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            slot = admit.slot
            self._keep(slot)
            self._texts.forget(slot)
            self._scopes[slot] = int.from_bytes(admit.scope[:8], "little")
            self._prompts[slot] = admit.num_prompt

    def propose(self, rows: KnownRows, steps: DraftSteps) -> torch.Tensor:
        texts = self._texts
        news = texts.follow(rows)
        if self._earlier.shape[1] != len(texts.cells):
            self._earlier = np.zeros((len(_RUNS), len(texts.cells)), np.int32)
        self._note(news.places, self._scopes[news.owners])
        return guesses_of(self._likeliest(news, np.array(rows.wanted)), rows.lengths.device)

    # ---------------------------------------------------------------------------------------- what was said

    def _note(self, places: LongArray, scopes: HashArray) -> None:
        """Put places at the heads of the chains of their runs."""
        for level, keys in enumerate(self._hashes(places, scopes).T):
            order = np.argsort(keys, kind="stable")
            keys, sorted_places = keys[order], places[order]
            earlier = np.empty_like(sorted_places)
            earlier[1:] = sorted_places[:-1]
            first = np.ones(len(keys), bool)
            first[1:] = keys[1:] != keys[:-1]
            earlier[first] = self._heads[level, keys[first]]
            self._earlier[level, sorted_places] = earlier
            self._heads[level, keys] = sorted_places

    def _hashes(self, places: LongArray, scopes: HashArray) -> LongArray:
        windows = self._texts.cells[places[:, None] - _BACK].astype(np.uint64)
        return hashes(windows, scopes, _COLUMNS, _BITS)

    def _keep(self, slot: int) -> None:
        """Copy a slot's output, and the end of its prompt, to the past outputs."""
        texts, known = self._texts, int(self._texts.known[slot])
        start = max(0, int(self._prompts[slot]) - _CONTEXT)
        count = min(known - start, _KEPT_TOKENS // 4)
        if not self._most_kept or known <= self._prompts[slot] or count <= _RUNS[0]:
            return
        if self._next + count + 2 > _KEPT_TOKENS:
            self._next = 0
        origin = texts.spare + self._next + 1  # behind a 0
        while self._kept and (len(self._kept) >= self._most_kept or self._overlaps(origin - 1, origin + count)):
            first, end = self._kept.popleft()
            texts.cells[first:end] = 0
        text = int(texts.origins(np.array([slot]))[0]) + known - count
        texts.cells[origin : origin + count] = texts.cells[text : text + count]
        self._kept_scopes[self._next : self._next + count + 2] = self._scopes[slot]
        self._kept.append((origin, origin + count))
        self._next += count + 1
        places = np.arange(origin, origin + count - 1)
        self._note(places, np.full(len(places), self._scopes[slot]))

    def _overlaps(self, start: int, end: int) -> bool:
        """Return whether the oldest output has tokens in [start, end]."""
        first, behind = self._kept[0]
        return first <= end and start < behind

    # ------------------------------------------------------------------------------------------- what follows

    def _likeliest(self, news: News, wanted: LongArray) -> LongArray:
        """Return guesses [rows, most wanted] at what follows the rows; -1: none.

        Of the places with the longest run, the one counts whose continuation is the most probable: a part of it as
        long as n tokens is as likely as the share of places that agree with it so far.
        """
        cells, ends = self._texts.cells, news.ends
        places = self._places(news)  # [rows, places]
        back = np.arange(self._depth)
        same = (cells[places[:, :, None] - back] == cells[ends[:, None] - back][:, None]) & (
            cells[ends[:, None] - back][:, None] > 0
        )
        alike = np.logical_and.accumulate(same, axis=2).sum(axis=2)
        alike = np.where(self._scope_of(places) == self._scopes[news.slots][:, None], alike, 0)
        alike[places == ends[:, None]] = 0
        longest = alike.max(axis=1)
        counts = (alike == longest[:, None]) & (longest >= _RUNS[0])[:, None]
        following = self._following(places, news, int(wanted.max()))
        agree = np.logical_and.accumulate(following[:, :, None] == following[:, None], axis=3)
        votes = (agree & counts[:, None, :, None]).sum(axis=2)
        chances = votes / np.maximum(counts.sum(axis=1), 1)[:, None, None]
        chances = np.where((following > 0) & counts[:, :, None], chances, 0)
        chances = np.where(np.logical_and.accumulate(chances >= max(self._least_chance, 1e-9), axis=2), chances, 0)
        best = chances.sum(axis=2).argmax(axis=1)
        rows = np.arange(len(ends))
        most = np.minimum(wanted, np.maximum(1, self._factor * longest).astype(np.int64))
        kept = (chances[rows, best] > 0) & (np.arange(following.shape[2]) < most[:, None])
        return np.where(kept, following[rows, best].astype(np.int64) - 1, -1)

    def _places(self, news: News) -> LongArray:
        """Return the newest places [rows, places] of runs that the rows end with, or of others with their hashes."""
        found = []
        for level, keys in enumerate(self._hashes(news.ends, self._scopes[news.slots]).T):
            places = self._heads[level, keys].astype(np.int64)
            for _ in range(_NEWEST):
                found.append(places)
                places = self._earlier[level, places].astype(np.int64)
        stacked: LongArray = np.stack(found, axis=1)
        return np.maximum(stacked, _FRONT - 1)  # where there is none: a cell that is always 0

    def _scope_of(self, places: LongArray) -> HashArray:
        texts = self._texts
        slots, kept = texts.slot_of(places), places - texts.spare
        past = np.zeros_like(places, dtype=np.uint64)
        if len(self._kept_scopes):
            past = self._kept_scopes[np.clip(kept, 0, len(self._kept_scopes) - 1)]
        return np.where(kept >= 0, past, self._scopes[np.minimum(slots, len(self._scopes) - 1)])

    def _following(self, places: LongArray, news: News, count: int) -> IntArray:
        """Return what followed places [rows, places, count], plus 1; 0 from where nothing did.

        Where that reaches the end of the row itself, it is taken to repeat.
        """
        cells, behind = self._texts.cells, news.ends[:, None] - places
        own = (self._texts.slot_of(places) == news.slots[:, None]) & (behind > 0)
        offsets = np.arange(count) % np.where(own, behind, count)[:, :, None]
        found = cells[np.minimum(places[:, :, None] + 1 + offsets, len(cells) - 1)]
        return np.where(np.logical_and.accumulate(found > 0, axis=2), found, 0)
