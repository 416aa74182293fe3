"""Every architecture against transformers: the same tokens as `generate`, the same log-probabilities.

A tiny random checkpoint, float32, greedy, through the whole engine, in each way in which a request can meet it. To add
an architecture, add its line to `ferrule_testkit.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_testkit.checkpoints import NATIVE, TRANSFORMERS, tiny_checkpoint
from ferrule_testkit.harness import Engine, Harness, Output

NEW_TOKENS = 14
TOLERANCE = 1e-4
CLEAR = 3e-4  # least distance between the two best logits: below, rounding could decide
BOTH = ("llama", "mistral", "gpt2", "gemma2")  # native ones that are run through transformers too
# Through transformers: one of each kind of attention and layer; the other architectures are in `make test-slow`.
KINDS = ("cohere2", "deepseek_v3", "gemma3_text", "gpt_bigcode", "gpt_neox", "gpt_oss", "mixtral")
CASES = [
    *((name, "auto") for name in (*NATIVE, *KINDS)),
    *(pytest.param(name, "auto", marks=pytest.mark.slow) for name in TRANSFORMERS if name not in KINDS),
    *((name, "transformers") for name in BOTH),
]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHORT = [prompt(length, seed) for seed, length in enumerate((9, 10, 11, 9))]
LONG = [prompt(30, 10), prompt(47, 11)]  # longer than the windows, which are 12
BRANCH = LONG[1][:35] + prompt(4, 12)  # begins as the longest one does


@dataclass(frozen=True)
class Reference:
    """What transformers generates after a prompt: tokens, and log-probabilities [tokens, vocab]."""

    tokens: list[int]
    logprobs: torch.Tensor


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda name: tiny_checkpoint(name, root / name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def references(folder: Path) -> dict[tuple[int, ...], Reference]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = {}
    for ids in (*SHORT, *LONG, BRANCH):
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > CLEAR, "a near-tie: give the recipe another seed"
        found[tuple(ids)] = Reference(out.sequences[0, len(ids) :].tolist(), logits.log_softmax(-1))
    return found


def compare(
    way: str, prompts: Sequence[list[int]], outputs: Sequence[Output], expected: dict[tuple[int, ...], Reference]
) -> None:
    for ids, output in zip(prompts, outputs, strict=True):
        wanted = expected[tuple(ids)]
        assert output.error is None, (way, output.error)
        assert output.token_ids == wanted.tokens, (way, len(ids))
        for position, given in enumerate(output.logprobs):
            row = wanted.logprobs[position]
            assert abs(given.logprob - row[given.token_id]) < TOLERANCE, (way, len(ids), position)
            top = torch.tensor([value for _, value in given.top])
            assert (top - row.topk(len(top)).values).abs().max() < TOLERANCE, (way, len(ids), position)
        assert len(output.logprobs) == NEW_TOKENS


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_tokens_and_logprobs_equal_those_of_transformers(name: str, implementation: str, folder_of: Any) -> None:
    folder = folder_of(name)
    expected = references(folder)
    everything = [*SHORT, *LONG]

    def run(engine: Engine, way: str, prompts: list[list[int]]) -> list[Output]:
        outputs = engine.run(prompts, max_tokens=NEW_TOKENS, logprobs=3)
        compare(way, prompts, outputs, expected)
        return outputs

    with Harness(folder, dtype="float32", model_impl=implementation) as harness:
        native = name in NATIVE and implementation == "auto"
        assert harness.info.implementation.startswith("transformers ") != native

        run(harness.engine(), "alone", LONG[1:])
        run(harness.engine(depth=2), "batch", everything)

        chunked = harness.engine(max_num_batched_tokens=8)
        run(chunked, "chunked prefill", everything)
        assert chunked.stats.steps > sum(map(len, everything)) / 8

        cached = harness.engine()
        run(cached, "prefix cache, filling", LONG[1:])
        assert run(cached, "prefix cache, hit", [BRANCH])[0].cached >= 32

        # room for the prompts, and for what only some of them write
        crowded = harness.engine(num_blocks=1 + 12 * len(harness.info.groups), prefix_caching=False)
        run(crowded, "preemption", SHORT)
        assert crowded.stats.preemptions > 0

        run(harness.engine(num_blocks=40, max_num_batched_tokens=24, policy="chaos", depth=2), "chaos", everything)


def test_prefixes_are_not_shared_over_a_length_border(folder_of: Any) -> None:
    """LongRoPE turns every token of a long prompt by other frequencies than a short prompt's: other cache entries."""
    short, long, longer = prompt(100, 20), prompt(100, 20) + prompt(40, 21), prompt(100, 20) + prompt(50, 22)
    with Harness(folder_of("phi3-longrope"), dtype="float32") as harness:
        alone = harness.engine().run([long])[0]
        engine = harness.engine()
        engine.run([short])
        assert engine.run([short])[0].cached > 90
        after_short = engine.run([long])[0]
        assert after_short.cached == 0
        assert after_short.token_ids == alone.token_ids
        assert engine.run([longer])[0].cached >= 96
