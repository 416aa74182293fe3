import torch

from ferrule.interfaces.sampler import SampleBatch, SampleRow
from ferrule.types import TokenSampling
from ferrule_example import LONGEST, ExampleSampler
from ferrule_testkit.kits import SamplerKit
from ferrule_testkit.kits.sampler import OnePlugin


class TestConformance(SamplerKit):
    plugin = ExampleSampler


def test_a_loop_ends() -> None:
    logits = torch.tensor([[0.0, 9.0, 3.0, 1.0]])
    history = torch.ones(1, 32, dtype=torch.int32)
    greedy = TokenSampling(seed=0, max_tokens=32, temperature=0.0)
    for position, token in ((LONGEST, 1), (LONGEST + 1, 2)):
        batch = SampleBatch([SampleRow(0, greedy, 1, position)], history)
        assert ExampleSampler(OnePlugin()).sample(logits.clone(), batch).tokens.tolist() == [token]
