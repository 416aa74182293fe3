"""The bank `lora`: tokens of rows with adapters are those of models that PEFT has merged the adapters into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule.config import LoRAConfig
from ferrule.types import Adapter
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness, Output
from tests.fakes.peft_adapters import make_adapter

PROMPTS = [list(range(5, 5 + length)) for length in (3, 30, 17)]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def section(**changes: Any) -> LoRAConfig:
    return LoRAConfig(**{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_lora_bias": True} | changes)


def said(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def check(found: Output, wanted: Output, tolerance: float = 1e-3) -> None:
    assert (found.error, found.token_ids) == (None, wanted.token_ids)
    assert [each.logprob for each in found.logprobs] == pytest.approx(
        [each.logprob for each in wanted.logprobs], abs=tolerance
    )


def alone(folder: Path, **kwargs: Any) -> list[Output]:
    with Harness(folder, dtype="float32", block_size=16) as opened:
        return opened.engine().run(PROMPTS, max_tokens=8, **kwargs)


BIASES: dict[str, dict[str, Any]] = {
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "all": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "dora": {"target_modules": ["q_proj", "v_proj"], "bias": "all", "use_dora": True},
}
LINEARS: dict[str, Any] = {}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "dora": {"target_modules": ALL, "use_dora": True},
    "ranks": {"target_modules": ALL, "rank_pattern": {"q_proj": 8, "up_proj": 2}, "alpha_pattern": {".*v_proj": 3}},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "layers": {"target_modules": ALL, "layers_to_transform": [1]},
    "bin": {"target_modules": ALL, "safe": False},
}


def compare(folder: Path, adapter: Adapter) -> None:
    """Run rows with an adapter and without, in one batch, chunked, and behind a cached prefix."""
    plain, wanted = alone(folder), alone(Path(adapter.path) / "merged")
    assert said(plain) != said(wanted)
    with Harness(folder, dtype="float32", block_size=16, lora=section()) as opened:
        engine = opened.engine(max_num_batched_tokens=16)
        found = engine.run(PROMPTS, max_tokens=8, adapters=[adapter, None, adapter])
        for number, reference in enumerate((wanted, plain, wanted)):
            check(found[number], reference[number])
        (again,) = engine.run([PROMPTS[1]], max_tokens=8, adapters=[adapter])
        check(again, wanted[1])


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_merged_model(llama: Path, tmp_path: Path, name: str) -> None:
    compare(llama, make_adapter(llama, tmp_path / name, **SETTINGS[name]))


@pytest.mark.parametrize("name", BIASES)
def test_biases_are_those_of_the_merged_model(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint("qwen2", tmp_path / "qwen2")
    compare(folder, make_adapter(folder, tmp_path / name, **BIASES[name]))


@pytest.mark.parametrize(
    "model", ["gpt2", "phi3", "mixtral", "deepseek_v3", "gemma2", "qwen3_moe", "falcon", "gpt_neox"]
)
def test_every_name_of_a_checkpoint_is_found(tmp_path: Path, model: str) -> None:
    folder = tiny_checkpoint(model, tmp_path / model)
    compare(folder, make_adapter(folder, tmp_path / "adapter", target_modules=LINEARS.get(model, "all-linear")))
