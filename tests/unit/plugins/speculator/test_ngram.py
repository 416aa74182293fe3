"""`ngram`: guesses equal those of a search through the whole text, however the text came."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ferrule.errors import ConfigError
from ferrule.interfaces.speculator import DraftSteps, KnownRows
from ferrule.types import Admit, TokenSampling
from ferrule_plugins.speculator.ngram import Ngram

NO_STEPS: Any = DraftSteps
WIDTH = 400


def speculator(slots: int = 4, **settings: Any) -> Ngram:
    context: Any = SimpleNamespace(num_tokens=8, num_slots=slots, settings=settings)
    return Ngram(context)


def admit(slot: int, scope: bytes = b"", num_prompt: int = 1) -> Admit:
    work = TokenSampling(seed=0, max_tokens=1)
    return Admit(slot=slot, id="r", epoch=1, known_ids=(1,), num_prompt=num_prompt, work=work, scope=scope)


def ask(made: Any, texts: dict[int, list[int]], wanted: int = 4, slots: int = 4) -> dict[int, list[int]]:
    """Return the guesses for texts by slot, up to the first that is none."""
    history = torch.full((slots, WIDTH), 9_999, dtype=torch.int32)
    for slot, text in texts.items():
        history[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    rows = KnownRows(
        slots=tuple(texts),
        wanted=(wanted,) * len(texts),
        lengths=torch.tensor([len(text) for text in texts.values()]),
        history=history,
        hidden=torch.zeros(len(texts), 1),
    )
    found = made.propose(rows, NO_STEPS).tolist()
    return {
        slot: guesses[: guesses.index(-1)] if -1 in guesses else guesses
        for slot, guesses in zip(texts, found, strict=True)
    }


def searched(text: list[int], least: int, most: int, count: int) -> list[int]:
    """Search the text for its last tokens, from the end."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        run = text[-length:]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == run:
                return [text[end + n % (len(text) - end)] for n in range(count)]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 5), (3, 3), (1, 8)])
def test_guesses_are_those_of_a_search(least: int, most: int) -> None:
    """Texts grow by any number of tokens, and are left out of some steps."""
    made, draw = speculator(prompt_lookup_min=least, prompt_lookup_max=most), random.Random(least)
    texts: dict[int, list[int]] = {}
    equal, compared = 0, 0
    for _ in range(250):
        slot = draw.randrange(4)
        if slot not in texts or len(texts[slot]) > 300:
            texts[slot] = [draw.randrange(5) for _ in range(draw.randint(1, 60))]
            made.admit([admit(slot)])
        texts[slot] += [draw.randrange(5) for _ in range(draw.randint(1, 5))]
        asked = {each: texts[each] for each in draw.sample(list(texts), draw.randint(1, len(texts)))}
        for each, guesses in ask(made, asked).items():
            wanted = searched(texts[each], least, most, 4)
            shorter = [searched(texts[each], least, length, 4) for length in range(least, most)]
            assert guesses in (wanted, [], *shorter)
            equal, compared = equal + (guesses == wanted != []), compared + bool(wanted)
    assert compared > 100
    assert equal >= 0.97 * compared  # two runs may have one hash


def test_another_request_in_the_slot_sees_nothing_of_the_first() -> None:
    made = speculator(prompt_lookup_max=3)
    made.admit([admit(0)])
    assert ask(made, {0: [5, 6, 7, 8, 5, 6]}) == {0: [7, 8, 5, 6]}
    made.admit([admit(0)])
    assert ask(made, {0: [5, 6]}) == {0: []}
    assert ask(made, {1: [5, 6]}) == {1: []}


def test_a_text_that_repeats_is_continued_past_its_end() -> None:
    made = speculator()
    made.admit([admit(2)])
    assert ask(made, {2: [1, 2, 3, 1, 2, 3]}, wanted=7) == {2: [1, 2, 3, 1, 2, 3, 1]}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max: 0 is not valid; expected a whole number from 1 to 32"),
        ({"prompt_lookup_min": "2"}, "prompt_lookup_min: '2' is not valid"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max (3) must be at least prompt_lookup_min"),
    ],
)
def test_settings_that_cannot_be_met(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        speculator(**settings)
    assert part in str(caught.value)
