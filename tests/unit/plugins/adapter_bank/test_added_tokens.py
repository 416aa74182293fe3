"""Adapters that add tokens: their rows are those of a model with more tokens that PEFT has merged them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ferrule.config import LoRAConfig
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness, Output
from tests.fakes.added_tokens import make_adapter

SIZE = 320  # tokens of the tiny checkpoint
PROMPTS = [[5, 6, SIZE, 8, SIZE + 2, 9], list(range(5, 35)), [SIZE + 1, *range(7, 23)]]
PLAIN = [[one if one < SIZE else one - SIZE for one in prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def section(**changes: Any) -> LoRAConfig:
    return LoRAConfig(**{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | changes)


def check(found: Output, wanted: Output) -> None:
    assert (found.error, found.token_ids) == (None, wanted.token_ids)
    assert [each.logprob for each in found.logprobs] == pytest.approx([e.logprob for e in wanted.logprobs], abs=1e-3)


def alone(folder: Path, prompts: list[list[int]], **sampling: Any) -> list[Output]:
    with Harness(folder, dtype="float32", block_size=16) as opened:
        return opened.engine().run(prompts, max_tokens=12, **sampling)


FORMS: dict[str, dict[str, Any]] = {
    "whole": {"target_modules": ["q_proj", "v_proj"]},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "separate": {"target_modules": ["q_proj"], "separate": True},
    "separate-ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "separate": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_with_added_tokens(llama: Path, tmp_path: Path, form: str) -> None:
    adapter = make_adapter(llama, tmp_path / "more", 3, **FORMS[form])
    fewer = make_adapter(llama, tmp_path / "fewer", 1, seed=2, target_modules=["q_proj"])
    plain, wanted = alone(llama, PLAIN), alone(tmp_path / "more" / "merged", PROMPTS)
    other = alone(tmp_path / "fewer" / "merged", PLAIN)
    assert any(id >= SIZE for output in wanted for id in output.token_ids)
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": section()}) as opened:
        engine = opened.engine(max_num_batched_tokens=16)
        for _ in range(3):  # the later ones with recorded steps, and behind cached prefixes
            for output, reference in zip(engine.run(PLAIN, max_tokens=12), plain, strict=True):
                check(output, reference)
            prompts, adapters = [PROMPTS[0], PLAIN[1], PROMPTS[2], PLAIN[0]], [adapter, None, adapter, fewer]
            found = engine.run(prompts, max_tokens=12, adapters=adapters)
            for output, reference in zip(found, (wanted[0], plain[1], wanted[2], other[0]), strict=True):
                check(output, reference)
        assert opened.executor.call("describe_adapter", ("more",))["num_added"] == 3
        bad = engine.run([PROMPTS[0], PROMPTS[1]], max_tokens=4, adapters=[fewer, fewer])
        assert "outside the vocabulary" in str(bad[0].error)
        assert bad[1].error is None
