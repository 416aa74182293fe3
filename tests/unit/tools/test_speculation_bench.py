"""The benchmarks of adapters and speculation: their turns, prompts, made-up adapters; and the sibling that they use."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

from ferrule_contrib import tiny
from tools.benchmarks.adapters import TARGETS, write_adapter
from tools.benchmarks.gpu_models import TINY
from tools.benchmarks.speculation import ALL, CASES, arguments, asked, copying, short
from tools.benchmarks.turns import Pairs, in_turns, numbers
from tools.tiny import sibling


def test_turns_alternate_and_the_first_does_not_count() -> None:
    told: list[str] = []

    def measured(name: str, value: float) -> float:
        told.append(name)
        return value

    pairs = in_turns(3, lambda n: measured(f"a{n}", 10.0 + n), lambda n: measured(f"b{n}", 20.0))
    assert told == ["b-1", "a-1", "a0", "b0", "b1", "a1", "a2", "b2"]
    assert pairs == Pairs((10.0, 11.0, 12.0), (20.0, 20.0, 20.0))
    assert pairs.ratio == pytest.approx(20 / 11)
    assert str(pairs) == "11.0 | 20.0 | 1.82 (1.67 to 2.00)"
    assert numbers("1,32") == [1, 32]


def test_all_tables_are_of_cases_that_there_are() -> None:
    found = [arguments().parse_args(short(run)) for run in ALL]
    assert {options.case for options in found} == set(CASES)
    assert [options.streams for options in found] == 6 * [[1]] + [[32]]


def test_prompts_are_new_in_each_round() -> None:
    for prompts in (asked, copying):
        first, again, other = (list(islice(prompts(seed), 20)) for seed in ("1", "1", "2"))
        assert first == again
        assert len(set(first) & set(other)) < 5  # greetings are few
    question, answer = (part.partition("<|im_end|>")[0] for part in next(copying("1")).split("assistant\n")[:2])
    assert len(answer) > 100
    assert next(copying("1")).count(question.partition("user\n")[2]) == 2


def test_a_made_up_adapter_has_the_shape_of_its_base(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", TINY, 3, TARGETS, 0)
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 not a mapping
    assert len(shapes) == 2 * len(TARGETS) * TINY.config["num_hidden_layers"]
    layer = "base_model.model.model.layers.1"
    assert shapes[f"{layer}.mlp.down_proj.lora_A.weight"] == [3, 96]
    assert shapes[f"{layer}.self_attn.v_proj.lora_B.weight"] == [32, 3]


def test_the_sibling_begins_as_the_embedded_model() -> None:
    wide, narrow = sibling.make_model(0), LlamaForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    assert wide.num_parameters() > 3.5 * narrow.num_parameters()
    ids = torch.arange(40).view(2, 20) * 50 % 2048
    with torch.no_grad():
        assert torch.allclose(wide(ids).logits, narrow(ids).logits, atol=1e-3)
    twins = wide.model.layers[0].mlp.up_proj.weight.chunk(2, dim=1)
    assert not torch.allclose(*twins, atol=1e-3)  # they learn apart


def test_the_sibling_is_small_and_has_the_vocabulary_of_the_embedded_model() -> None:
    files = [file for file in sibling.FOLDER.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20_000_000
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (sibling.FOLDER / name).read_bytes() == (tiny.path() / name).read_bytes()
