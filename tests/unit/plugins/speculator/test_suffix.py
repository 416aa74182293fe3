"""`suffix`: guesses come from what was said before, in one scope, and memory is bounded."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrule.errors import ConfigError
from ferrule_plugins.speculator import suffix
from ferrule_plugins.speculator.suffix import Suffix
from tests.unit.plugins.speculator.test_ngram import admit, ask

TEXT = [11, 12, 13, 14, 15, 16, 17, 18]


def speculator(**settings: Any) -> Suffix:
    named = {f"suffix_decoding_{key}": value for key, value in settings.items()}
    context: Any = SimpleNamespace(num_tokens=8, num_slots=4, settings=named)
    return Suffix(context)


def say(made: Suffix, slot: int, text: list[int], scope: bytes = b"", num_prompt: int = 1) -> dict[int, list[int]]:
    """Begin a request in a slot, and return guesses at what follows its text."""
    made.admit([admit(slot, scope, num_prompt)])
    return ask(made, {slot: text})


def test_an_output_is_said_again() -> None:
    made = speculator(max_spec_factor=4.0)
    assert say(made, 0, [1, *TEXT]) == {0: []}
    assert say(made, 0, [2, 11, 12, 13]) == {0: [14, 15, 16, 17]}  # what the first request said is kept
    assert say(made, 1, [3, 13, 14]) == {1: [15, 16, 17, 18]}
    assert say(made, 2, [3, 12, 11]) == {2: []}


def test_the_longest_run_counts() -> None:
    made = speculator(max_spec_factor=4.0)
    assert say(made, 0, [1, 12, 13, 20, 20, 20, 11, 12, 13, 30, 31, 32, 33, 12, 13, 20, 9, 8, 11, 12, 13]) == {
        0: [30, 31, 32, 33]
    }


def test_the_likeliest_of_several_counts() -> None:
    made = speculator(max_spec_factor=4.0)
    said = [1, 5, 6, 7, 8, 9, 2, 5, 6, 7, 4, 4, 3, 5, 6, 7, 8, 9, 4, 5, 6]
    assert say(made, 0, said)[0][:3] == [7, 8, 9]


def test_no_more_guesses_than_the_run_is_long() -> None:
    made = speculator()
    say(made, 0, [1, *TEXT])
    assert say(made, 1, [2, 11, 12]) == {1: [13, 14]}


def test_another_scope_is_told_nothing() -> None:
    made = speculator(max_spec_factor=4.0)
    say(made, 0, [1, *TEXT], scope=b"tenant a")
    assert say(made, 1, [2, 11, 12, 13], scope=b"tenant b") == {1: []}  # one that runs
    made.admit([admit(0)])
    assert say(made, 1, [2, 11, 12, 13], scope=b"tenant b") == {1: []}  # one that has ended
    assert say(made, 1, [2, 11, 12, 13], scope=b"tenant a") == {1: [14, 15, 16, 17]}


def test_prompts_of_others_are_not_kept() -> None:
    made = speculator(max_spec_factor=4.0)
    say(made, 0, [1, *TEXT], num_prompt=9)
    made.admit([admit(0)])
    assert say(made, 1, [2, 11, 12, 13]) == {1: []}


@pytest.mark.parametrize("most", [0, 2])
def test_few_outputs_are_kept(most: int) -> None:
    made = speculator(max_cached_requests=most, max_spec_factor=4.0)
    for first in range(100, 500, 100):
        say(made, 0, [1, *range(first, first + 8)])
    made.admit([admit(0)])
    texts = [[2, first, first + 1, first + 2] for first in range(100, 500, 100)]
    found = [say(made, 1, text, num_prompt=4)[1] for text in texts]
    assert [bool(guesses) for guesses in found] == [False] * (4 - most) + [True] * most


def test_memory_is_bounded_and_guesses_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write over old outputs again and again; each guess was said behind the run that the text ends with."""
    monkeypatch.setattr(suffix, "_KEPT_TOKENS", 500)
    made, draw = speculator(), random.Random(3)
    said: list[list[int]] = []
    size, guessed = 0, 0
    for _ in range(150):
        slot, text = draw.randrange(4), [draw.randrange(4) for _ in range(draw.randint(4, 60))]
        if said and draw.random() < 0.6:
            text = list(said[-1])[: draw.randint(3, len(said[-1]))]
        guesses = say(made, slot, text)[slot]
        said.append(text)
        size = size or len(made._texts.cells)
        assert len(made._texts.cells) == size
        guessed += bool(guesses)
        run = [*text[-2:], *guesses[:1]]
        spans = (other[n : n + len(run)] for other in said for n in range(len(other)))
        assert not guesses or run in spans
    assert guessed > 50
    assert not np.any(made._texts.cells[:64])


def test_settings_that_cannot_be_met() -> None:
    with pytest.raises(ConfigError, match="min_token_prob: 2 is not valid; expected a number from 0 to 1"):
        speculator(min_token_prob=2)
