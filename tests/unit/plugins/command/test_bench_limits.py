"""Limits of the machine, what tokens cost, and the fractions that benchmarks print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ferrule.types import CacheGroup, ModelInfo
from ferrule_kernels.cpu import library
from ferrule_plugins.command.bench import limits
from ferrule_plugins.command.bench.limits import Cost, Limits
from ferrule_plugins.command.bench.load import Record, near

V, H = 50, 8
BODY = 3 * H * H  # of the matrices below


def _checkpoint(folder: Path, *, head: bool, tied: bool) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": H,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = {
        "model.embed_tokens.weight": (V, H),
        "model.layers.0.mlp.up_proj.weight": (3 * H, H),
        "model.norm.weight": (H,),
    }
    if head:
        names["lm_head.weight"] = (V, H)
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in names.items()}, folder / "model.safetensors"
    )
    return str(folder)


@pytest.mark.parametrize(("head", "tied"), [(False, True), (True, True), (True, False)])
def test_cost_of_a_checkpoint(tmp_path: Path, head: bool, tied: bool) -> None:
    cost = limits.cost_of(_checkpoint(tmp_path, head=head, tied=tied))
    assert (cost.body, cost.head) == (BODY, V * H)
    assert cost.step_bytes == 2 * (BODY + V * H + H)  # each table of the two is read once, or by its rows
    assert cost.token_bytes == 3 * 2 * 1 * 4 * 2
    assert cost.operations(10, 1) == 2 * (10 * BODY + V * H)
    assert cost.decode_bytes(4, 100) == cost.step_bytes + 400 * cost.token_bytes


def _info(**changes: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "architecture": "A",
        "implementation": "a",
        "vocab_size": V,
        "max_model_len": 64,
        "dtype": "float32",
        "device": "cpu",
        "attention": "cpu",
        "groups": (CacheGroup("full", 16),),
        "page_bytes": 16 * 96,
        "max_blocks": 9,
        "num_parameters": 1000,
        "weight_bytes": 7000,
    }
    return ModelInfo(**(values | changes))


def test_the_engine_knows_how_weights_are_kept(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, head=False, tied=True)
    plain = limits.cost_of(folder, _info())
    assert plain == Cost(BODY, V * H, 4 * (BODY + V * H), 96)
    assert limits.cost_of(folder, _info(quantization="int8")).step_bytes == 7000 - 4 * V * H
    assert limits.cost_of(None, _info(groups=())) == Cost(1000, 0, 7000, 0)


def test_a_packed_table_is_not_read_by_a_step(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, head=False, tied=False)
    packed = {"embed_tokens.table.packed_weight": torch.zeros(300, dtype=torch.uint8), "lm_head.packed_weight": 500}
    tensors = {name: torch.zeros(each) if isinstance(each, int) else each for name, each in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert limits.cost_of(folder).step_bytes == 4 * 500
    assert limits.cost_of(folder, _info(quantization="ferrule_packed")).step_bytes == 7000 - 300


def test_what_is_not_known_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for folder in (None, "no/such/folder", str(tmp_path)):
        assert limits.cost_of(folder) == Cost()
    assert limits.decode_figures(Limits(), Cost(), 1, 1, 1.0) == {}
    assert limits.computed("prefill", Limits(), Cost(), (1, 1), 1.0) == {}
    assert limits.decode_figures(Limits(), Cost(step_bytes=10**9), 1, 1, 0.5) == {"decode_gb_s": 2.0}


def test_fractions() -> None:
    machine, cost = Limits(2, 10e9, 4e12, 8e12), Cost(10**9, 10**8, 2 * 10**9, 10**5)
    assert limits.decode_figures(machine, cost, 10, 1000, 0.5) == {"decode_gb_s": 6.0, "decode_of_limit": 0.6}
    assert limits.computed("prefill", machine, cost, (500, 1), 1.0) == {
        "prefill_tflop_s": 1.0,
        "prefill_of_limit": 0.25,
    }
    assert machine.figures["limit_read_gb_s"] == 10.0


def test_a_servers_records() -> None:
    records = [Record(0.0, [1.0, 1.5, 2.0], 100, 3, 20, 2.0), Record(0.0, error="lost")]
    found = near(Limits(1, 4e9, 1e12, 0.0), Cost(10**9, 0, 10**9, 0), records, 4.0)
    assert found["decode_of_limit"] == 0.5
    assert found["compute_tflop_s"] == round(2 * 83 * 1e9 / 4 / 1e12, 3)
    assert near(Limits(), Cost(), records, 4.0) == {}


@pytest.mark.skipif(not library.available(), reason="there are no compiled kernels here")
def test_the_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = limits.measure()
    assert found.threads >= 1
    assert found.read_bytes > 0
    assert found.bf16 > 0
    assert "GB/s" in capsys.readouterr().out


def test_a_machine_without_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(limits.sys, "executable", "false")
    assert limits.measure() == Limits()
    assert "could not be measured" in capsys.readouterr().out


def test_whose_limits_count() -> None:
    assert limits.here("http://127.0.0.1:8000")
    assert not limits.here("https://example.org/v1")
