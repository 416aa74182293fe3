"""Ways to cut a text into deltas."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

SHORT = 10  # characters up to which every cut is tried


def cuts(text: str, seed: int = 0, randoms: int = 12) -> Iterator[list[str]]:
    """Yield every cut of a short text; of a longer one single characters, every cut in two, even pieces, and random
    cuts.
    """
    if len(text) <= SHORT:
        for bits in range(1 << max(0, len(text) - 1)):
            yield _at(text, [at for at in range(1, len(text)) if bits >> (at - 1) & 1])
        return
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    for size in (2, 3, 5, 7, 16):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    rng = random.Random(f"{seed}:{text}")
    for _ in range(randoms):
        places = sorted(rng.sample(range(1, len(text)), rng.randint(1, len(text) - 1)))
        pieces = _at(text, places)
        pieces.insert(rng.randrange(len(pieces) + 1), "")  # a token may bring no text
        yield pieces


def _at(text: str, places: Sequence[int]) -> list[str]:
    return [text[start:stop] for start, stop in pairwise([0, *places, len(text)])] if text else [text]
