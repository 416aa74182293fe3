"""Constraints are tried in the child that compiles them: what would stall or fail an answer is refused beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ferrule.errors import RequestError
from ferrule.forms import Form, GrammarSpec, Json, Regex
from ferrule.frontend.guided.probe import TOKENS, probe
from ferrule.interfaces.guided_decoding import Grammar, Vocabulary
from tests.unit.frontend.guided.test_hostile_constraints import compiler

LETTERS = Vocabulary((b"a", b"bb", b"", b"c"), 40, (2,))


class Costly(Grammar):
    """Any letter may come; following one takes what `cost` says of the number of letters before it."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost = cost
        self.taken: list[int] = []
        self.now = 0.0

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        self.now += self.cost(len(self.taken))
        mask[0] = 0b1111

    def accept(self, ids: Sequence[int]) -> bool:
        self.taken += ids
        return True

    def rollback(self, count: int) -> None: ...

    def fork(self) -> Grammar:
        self.taken = []
        return self


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (lambda n: 0.001, None),
        (lambda n: 0.02 * (n > 9), "longer with each token"),
        (lambda n: 0.12, None),  # slow, and always so
        (lambda n: 0.3 * (n == 40), "0.30 s to follow a token, and at most 0.15"),
        (lambda n: 0.0005 + 0.0006 * n, "longer with each token"),
    ],
)
def test_what_following_may_cost(cost: Callable[[int], float], words: str | None) -> None:
    grammar = Costly(cost)
    said = probe(grammar, LETTERS, lambda: grammar.now)
    assert said is None if words is None else said is not None and words in said
    assert len(grammar.taken) <= TOKENS
    assert 2 not in grammar.taken  # what ends the text


COUNTS, NESTED = Regex("(((a{1,99}){1,99}){1,99}){1,99}"), Regex("(" * 60 + "a" + ")*" * 60)
PATTERN = Json({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"})


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("guidance", COUNTS),
        ("guidance", PATTERN),
        pytest.param("xgrammar", NESTED, marks=pytest.mark.slow),
        pytest.param("xgrammar", COUNTS, marks=pytest.mark.slow),
        pytest.param("xgrammar", PATTERN, marks=pytest.mark.slow),
        pytest.param("outlines", COUNTS, marks=pytest.mark.slow),
    ],
)
async def test_a_constraint_that_would_stall_or_fail_an_answer_is_refused(backend: str, form: Form) -> None:
    made = compiler(backend)
    try:
        with pytest.raises(RequestError) as caught:
            await made.compile(GrammarSpec(form=form), "guided_regex")
    finally:
        await made.close()
    assert caught.value.param == "guided_regex"
