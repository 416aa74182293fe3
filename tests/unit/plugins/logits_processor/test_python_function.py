"""Functions of vLLM's form as logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ferrule.interfaces.sampler import LogitsProcessor
from ferrule_plugins.logits_processor.python_function import PythonFunction

LOGITS = torch.zeros(8)


def output_only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + sum(output_ids)


def with_prompt(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + 100 * sum(prompt_ids) + sum(output_ids)


def more_than_needed(output_ids: list[int], logits: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return logits + scale * sum(output_ids)


def maker(amount: float, *, twice: bool = False) -> Any:
    return lambda output_ids, logits: logits + amount * (2 if twice else 1)


class Adder:
    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 3


class Own(LogitsProcessor):
    def __init__(self, amount: float = 9) -> None:
        self.amount = amount

    def apply(self, known_ids: Sequence[int], num_prompt: int, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.amount + num_prompt


HERE = __name__


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"function": output_only}, 7),
        ({"function": with_prompt}, 307),
        ({"function": more_than_needed}, 14),
        ({"function": f"{HERE}.with_prompt"}, 307),
        ({"function": f"{HERE}:with_prompt"}, 307),
        ({"function": f"{HERE}.Adder"}, 3),
        ({"function": Adder()}, 3),
        ({"function": f"{HERE}.maker", "args": [5]}, 5),
        ({"function": f"{HERE}.maker", "args": [5], "kwargs": {"twice": True}}, 10),
        ({"function": f"{HERE}.Own"}, 11),
        ({"function": f"{HERE}.Own", "kwargs": {"amount": 1}}, 3),
    ],
)
def test_it_gets_what_its_form_asks_for(given: dict[str, Any], added: float) -> None:
    known = (1, 2, 3, 4)  # two of the prompt, two of the output
    assert PythonFunction(**given).apply(known, 2, LOGITS).tolist() == [added] * 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": lambda: None}, "must take"),
        ({"function": lambda a: None}, "must take"),
        ({"function": lambda a, b, c, d: None}, "must take"),
        ({"function": "json.__doc__"}, "not a function"),
        ({"function": "no_such_module.f"}, "cannot be imported"),
        ({"function": f"{HERE}.no_such"}, "cannot be imported"),
        ({"function": f"{HERE}.maker", "kwargs": {"thrice": True}}, "these arguments"),
        ({}, "takes function"),
    ],
)
def test_what_cannot_be_one(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PythonFunction(**given)
