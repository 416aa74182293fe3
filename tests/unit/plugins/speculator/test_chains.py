"""Chains of guesses: right ones, recorded passes, cached prefixes, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_plugins.speculator.eagle import EagleHead
from ferrule_plugins.speculator.eagle3 import Eagle3Head
from ferrule_testkit.harness import Harness
from tests.fakes.heads import (
    HIDDEN,
    INNER_IDS,
    HeadHarness,
    eagle3_tensors,
    eagle_tensors,
    head_config,
    write_head,
    write_variant,
)

PROMPTS = [list(range(5, 30)), [21, 22, 23], [40], list(range(200, 211))]


def knowing_eagle(folder: Path, head: Path) -> Path:
    """Write a model with one layer, and a head that computes what the model does, but for the first token's part.

    Attention is made to matter little, because the head does not see that token.
    """
    model = write_variant(folder, "llama", num_hidden_layers=1)
    model.model.layers[0].self_attn.o_proj.weight.mul_(0.01)
    model.save_pretrained(folder)
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in state.items() if name.startswith(("layers.", "norm."))}
    tensors["fc.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)  # the embedding alone
    return write_head(head, head_config(), tensors)


@pytest.mark.parametrize("limits", [{}, {"depth": 2}, {"num_blocks": 24, "max_num_batched_tokens": 12}], ids=str)
def test_a_head_that_knows_the_model_guesses_right(tmp_path: Path, limits: dict[str, int]) -> None:
    head, manner = (
        knowing_eagle(tmp_path / "model", tmp_path / "head"),
        {"max_tokens": 30, "temperature": 1.0, "seed": 3},
    )
    random = write_head(tmp_path / "random", head_config(), eagle_tensors())
    with Harness(tmp_path / "model", dtype="float32") as harness:
        texts = [
            [*ids, *o.token_ids] for ids, o in zip(PROMPTS, harness.engine().run(PROMPTS, max_tokens=30), strict=True)
        ]
        sampled = [output.token_ids for output in harness.engine().run(PROMPTS, **manner)]
    shares = []
    for folder in (head, random):
        with HeadHarness(tmp_path / "model", "eagle", 4, model=str(folder)) as guessing:
            engine = guessing.engine(**limits)
            found = engine.run(PROMPTS, max_tokens=30)
            assert [[*ids, *o.token_ids] for ids, o in zip(PROMPTS, found, strict=True)] == texts
            shares.append(guessing.share_right(texts))
            again = engine.run([[*texts[0][:40], 7]], max_tokens=8)  # behind a prefix that was cached
            assert again[0].cached > 0 or "num_blocks" in limits
            assert [output.token_ids for output in guessing.engine(**limits).run(PROMPTS, **manner)] == sampled
    assert shares[0] > 0.75
    assert shares[1] < 0.1


# ------------------------------------------------------------------------------------------------ recorded passes


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_recorded_steps_give_the_same_guesses(
    tmp_path: Path, tiny_llama: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare guesses where the device records steps and passes with those where all are launched."""
    kind, passes = {"eagle": EagleHead, "eagle3": Eagle3Head}[method], 0
    follow = kind.follow

    def counted(head: Any, *given: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return follow(head, *given)

    monkeypatch.setattr(kind, "follow", counted)
    tensors = eagle_tensors() if method == "eagle" else eagle3_tensors()
    folder = write_head(tmp_path / "head", head_config(**INNER_IDS), tensors)
    found, counts = [], []
    for eager in (True, False):
        options = {"block_size": 16, "enforce_eager": eager}
        with HeadHarness(tiny_llama, method, 4, options, model=str(folder)) as harness:
            passes = 0
            outputs = harness.engine().run(PROMPTS, max_tokens=30)
            found.append(([output.token_ids for output in outputs], sorted(harness.proposed)))
            counts.append(passes)
    assert found[0] == found[1]
    assert counts[1] < counts[0] / 2  # what is replayed is not called


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_what_another_request_left_in_a_block_decides_nothing(tmp_path: Path, tiny_llama: Path, method: str) -> None:
    """Compare guesses behind cached prefixes, whose request ended with a block, in fresh blocks and in used ones."""
    tensors = eagle_tensors() if method == "eagle" else eagle3_tensors()
    folder = write_head(tmp_path / "head", head_config(**INNER_IDS), tensors)
    prompts = [list(range(start, start + 16)) for start in (100, 120, 140, 160)]
    found = []
    for others in (0, 12):
        with HeadHarness(tiny_llama, method, 3, model=str(folder)) as harness:
            engine = harness.engine(num_blocks=64, max_num_seqs=4)
            engine.run([[7, *range(start, start + 24)] for start in range(20, 20 + others)], max_tokens=20)
            engine.run(prompts, max_tokens=1)  # nothing is guessed
            harness.proposed.clear()
            again = engine.run([[*prompt, 9] for prompt in prompts], max_tokens=4)
            assert [output.cached for output in again] == [16] * 4
            found.append(sorted(harness.proposed))
    assert found[0] == found[1]
