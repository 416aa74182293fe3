import torch

from ferrule_example import ExampleProcessor
from ferrule_testkit.kits import LogitsProcessorKit


class TestConformance(LogitsProcessorKit):
    plugin = ExampleProcessor


def test_the_answer_begins_as_it_is_told_to() -> None:
    processor = ExampleProcessor(ids=[3, 1])
    logits = torch.tensor([0.1, 0.2, 0.9, 0.3])
    tokens = [int(processor.apply([7, 7, *said], 2, logits).argmax()) for said in ([], [3], [3, 1])]
    assert tokens == [3, 1, 2]
