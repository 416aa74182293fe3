"""What following a constraint costs, tried in the child that compiled it: the engine has one thread for all of them.

Some constraints compile at once, and then take longer with each token, or fail in the middle of an answer: nested
repetitions double the states of a parser, and a library's own limits are met only when a text gets there. So a text is
written under the constraint, token by token, in the ways that make such constraints grow.

The engine gives a constraint 0.15 s of a processor in a step (`ferrule.runner.grammars`), which catches what gets slow
only later. A row without a mask could instead be left out of steps until it has one, but its thread would use the
processor that the others need for as long as the client likes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import numpy as np

from ferrule.interfaces.guided_decoding import Grammar, Vocabulary

TOKENS = 64  # of each text
TOKEN_SECONDS = 0.15  # of a processor, that following one token and finding the next ones may take
_TEXT_SECONDS = 1.0  # of a processor, after which a text is long enough
_EARLY = 8  # tokens, the cost of which the last ones are compared with
_GROWTH = 8.0  # times the cost of early tokens
_CHEAP_SECONDS = 0.01  # a token that takes less may grow as it likes
_SEED = 0


def probe(first: Grammar, vocabulary: Vocabulary, seconds: Callable[[], float] = time.thread_time) -> str | None:
    """Write two texts from the `first` state, which is not changed; return what is wrong, or None.

    One text repeats a token for as long as it may, the other takes tokens at random. Raises what the grammar raises:
    ValueError, where the constraint turns out to be too complex.
    """
    rng = random.Random(_SEED)

    def again(ids: Sequence[int], last: int) -> int:
        return last if last in ids else min(ids, key=lambda id: len(vocabulary.tokens[id]))  # many steps to a text

    for choose in (again, lambda ids, _: rng.choice(ids)):
        costs = []
        for cost in _costs(first.fork(), vocabulary, choose, seconds):
            if cost > TOKEN_SECONDS:
                return f"it takes {cost:.2f} s to follow a token, and at most {TOKEN_SECONDS} are given"
            costs.append(cost)
            if sum(costs) > _TEXT_SECONDS:
                break
        late = fmean(costs[-_EARLY:]) if costs else 0.0
        if late > max(_CHEAP_SECONDS, _GROWTH * fmean(costs[:_EARLY])):
            return f"following it takes longer with each token, {late:.2f} s after {len(costs)} of them"
    return None


def _costs(
    grammar: Grammar,
    vocabulary: Vocabulary,
    choose: Callable[[Sequence[int], int], int],
    seconds: Callable[[], float],
) -> Iterator[float]:
    """Write one text; yield the seconds of each token. Raises ValueError where a token that is allowed does not fit."""
    bits, last = np.zeros(vocabulary.words, np.int32), -1
    for _ in range(TOKENS):
        before = seconds()
        grammar.fill(bits)
        ids = _ids(bits, vocabulary)
        if not ids:
            return
        last = choose(ids, last)
        if not grammar.accept([last]):
            raise ValueError("a token that it allows does not fit it")
        yield seconds() - before


def _ids(bits: np.ndarray, vocabulary: Vocabulary) -> Sequence[int]:
    """Return the ids that a mask allows, without those that end the text."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return [id for id in allowed if id < len(vocabulary.tokens) and vocabulary.tokens[id]]
