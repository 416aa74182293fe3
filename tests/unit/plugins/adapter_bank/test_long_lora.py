"""Adapters that were trained with longer texts: their tokens are those of a model whose rotary positions are scaled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ferrule.config import LoRAConfig
from ferrule.errors import CheckpointError, ConfigError
from ferrule.interfaces.adapters import ContextScaling
from ferrule.types import Adapter
from ferrule_plugins.adapter_bank.lora.lengths import factor_of
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness
from tests.fakes.lora_files import merged, write_adapter

LENGTH = 256  # of the tiny checkpoint
COUNT = 10
LONG: dict[str, Any] = {"max_tokens": COUNT, "min_tokens": COUNT, "stop_token_ids": (2,)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def with_rope(folder: Path, **rope: Any) -> Path:
    """Change the rotary settings of a checkpoint."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"].update(rope)
    file.write_text(json.dumps(config))
    return folder


def wanted(folder: Path, prompt: list[int], factor: float) -> list[int]:
    """Return what transformers says with positions that are divided by a factor."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        with_rope(folder, rope_type="linear", factor=factor), dtype=torch.float32
    )
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, pad_token_id=0
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def prompt(length: int) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(3, 320, (length,), generator=draw).tolist()


def test_rows_of_several_factors_share_steps(llama: Path, tmp_path: Path) -> None:
    cases = {"base": (1.0, 200), "plain": (1.0, 130), "double": (2.0, 300), "triple": (3.0, 700), "again": (2.0, 290)}
    lengths = {"double": 2 * LENGTH, "triple": 3 * LENGTH - 100, "again": 2 * LENGTH}  # one of them is rounded up
    adapters: dict[str, Adapter | None] = {"base": None}
    said = {}
    for number, (name, (factor, size)) in enumerate(cases.items()):
        folder = llama
        if name != "base":
            more = {"context_length": lengths[name]} if name in lengths else {}
            folder = write_adapter(llama, tmp_path / name, number, **more)
            adapters[name] = Adapter(name=name, path=str(folder))
        made = merged(llama, folder, tmp_path / "merged" / name) if name != "base" else _copy(llama, tmp_path / "base")
        said[name] = wanted(made, prompt(size), factor)
        assert name in ("base", "plain") or said[name] != wanted(made, prompt(size), 1.0)
    lora = LoRAConfig(enable_lora=True, max_loras=4, long_lora_scaling_factors=(2.0, 3.0))
    with Harness(llama, dtype="float32", block_size=16, sections={"lora": lora}) as opened:
        assert (opened.info.max_model_len, opened.info.own_len) == (3 * LENGTH, LENGTH)
        engine = opened.engine(max_num_batched_tokens=64)
        for _ in range(3):  # the later ones with recorded steps, and behind cached prefixes
            found = engine.run(
                [prompt(size) for _, size in cases.values()],
                **LONG,
                adapters=[adapters[name] for name in cases],
            )
            assert {name: one.token_ids for name, one in zip(cases, found, strict=True)} == said
        fields = opened.executor.call("describe_adapter", ("triple",))
        assert (fields["max_len"], opened.executor.call("describe_adapter", ("plain",))["max_len"]) == (3 * LENGTH, 0)
        # A slot that had such an adapter is the model's again.
        other = Adapter(name="other", path=adapters["plain"].path if adapters["plain"] else "")
        (plain,) = engine.run([prompt(130)], **LONG, adapters=[other])
        assert plain.token_ids == said["plain"]


def _copy(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_factors_stand_in_the_place_of_the_models_own(llama: Path, tmp_path: Path) -> None:
    base = with_rope(_copy(llama, tmp_path / "base"), rope_type="linear", factor=2.0)
    folder = write_adapter(base, tmp_path / "long", 1, context_length=4 * LENGTH)
    said = wanted(merged(base, folder, tmp_path / "merged"), prompt(600), 4.0)
    lora = LoRAConfig(enable_lora=True, long_lora_scaling_factors=(4.0,))
    with Harness(base, dtype="float32", block_size=16, sections={"lora": lora}) as opened:
        assert (opened.info.max_model_len, opened.info.own_len) == (4 * LENGTH, 2 * LENGTH)
        adapter = Adapter(name="long", path=str(folder))
        (found,) = opened.engine().run([prompt(600)], **LONG, adapters=[adapter])
        assert found.token_ids == said


@pytest.mark.parametrize(
    ("context", "own", "factors", "factor"),
    [
        (0, 1.0, (2.0,), None),
        (100, 1.0, (), None),
        (256, 1.0, (), None),
        (512, 1.0, (2.0, 4.0), 2.0),
        (384, 1.0, (1.5, 2.0), 1.5),
        (384, 1.0, (2.0,), 2.0),
        (512, 2.0, (4.0,), None),
        (256, 2.0, (4.0, 1.0), 1.0),
    ],
)
def test_the_factor_of_a_length(context: int, own: float, factors: tuple[float, ...], factor: float | None) -> None:
    assert factor_of(context, ContextScaling(original=LENGTH, own=own, factors=factors)) == factor


@pytest.mark.parametrize(("context", "factors"), [(512, ()), (512, (4.0,)), (257, ()), (256, None)])
def test_a_length_that_no_factor_fits(context: int, factors: tuple[float, ...] | None) -> None:
    scaling = ContextScaling(original=LENGTH, own=2.0 if factors is None else 1.0, factors=factors or ())
    with pytest.raises(CheckpointError, match=r"context_length of .* there are the factors .*--long-lora-scaling"):
        factor_of(context, scaling)


@pytest.mark.parametrize("value", [-1, 1.5, "long", True, 10**30, [512]])
def test_lengths_that_are_none(llama: Path, tmp_path: Path, value: Any) -> None:
    folder = write_adapter(llama, tmp_path / "a", 1, context_length=value)
    lora = LoRAConfig(enable_lora=True, long_lora_scaling_factors=(2.0,))
    with Harness(llama, dtype="float32", sections={"lora": lora}) as opened:
        (found,) = opened.engine().run([[3]], max_tokens=1, adapters=[Adapter(name="a", path=str(folder))])
        assert found.invalid
        assert "context_length" in str(found.error)


def test_models_whose_positions_cannot_be_scaled(llama: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(enable_lora=True, long_lora_scaling_factors=(2.0,))
    yarn = with_rope(_copy(llama, tmp_path / "yarn"), rope_type="yarn", factor=2.0)
    for folder, said in ((yarn, "another type"), (tiny_checkpoint("opt", tmp_path / "opt"), "no rotary positions")):
        with pytest.raises(ConfigError, match=f"--long-lora-scaling-factors: .*{said}"):
            Harness(folder, dtype="float32", sections={"lora": lora})
