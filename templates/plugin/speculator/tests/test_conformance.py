from types import SimpleNamespace

import torch

from ferrule.interfaces.speculator import KnownRows
from ferrule_example import ExampleSpeculator
from ferrule_testkit.kits import SpeculatorKit


class TestConformance(SpeculatorKit):
    plugin = ExampleSpeculator


def test_what_followed_is_guessed() -> None:
    history = torch.tensor([[5, 6, 7, 8, 5, 0, 0], [1, 2, 3, 4, 9, 9, 9]], dtype=torch.int32)
    lengths = torch.tensor([5, 4])
    rows = KnownRows(slots=(0, 1), wanted=(3, 3), lengths=lengths, history=history, hidden=torch.zeros(2, 1))
    made = ExampleSpeculator(SimpleNamespace(settings={}))  # type: ignore[arg-type]
    assert made.propose(rows, None).tolist() == [[6, 7, 8], [-1, -1, -1]]  # type: ignore[arg-type]
