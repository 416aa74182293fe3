"""`mtp`: the layer behind a model's last, compared with the same layer of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.errors import StartupError
from ferrule_testkit.checkpoints import SIZES
from ferrule_testkit.harness import Harness
from ferrule_testkit.quantized import quantized_checkpoint
from tests.fakes.heads import HeadHarness, Reference, Tensors, chain, random_tensors, run_layer, write_variant

HIDDEN, LAYERS = 64, 2
PROMPTS = [list(range(5, 30)), [21, 22, 23], [40]]
NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


def write_model(folder: Path, recipe: str) -> tuple[Any, Tensors]:
    """Write a tiny checkpoint with a layer that predicts further tokens; return the layer, and the other weights."""
    changes: dict[str, Any] = {"num_hidden_layers": LAYERS + 1, "num_nextn_predict_layers": 1}
    if recipe == "qwen3_next":
        changes["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
    larger = write_variant(folder, recipe, **changes)
    tensors = load_file(folder / "model.safetensors")
    own = random_tensors(7, enorm=(HIDDEN,), hnorm=(HIDDEN,), eh_proj=(HIDDEN, 2 * HIDDEN), norm=(HIDDEN,))
    if recipe == "qwen3_next":
        tensors = {re.sub(rf"^model\.layers\.{LAYERS}\.", "mtp.layers.0.", name): t for name, t in tensors.items()}
        tensors |= {f"mtp.{NAMES[name]}.weight": tensor for name, tensor in own.items()}
    else:
        prefix = f"model.layers.{LAYERS}."
        tensors |= {f"{prefix}{name}.weight": own[name] for name in ("enorm", "hnorm", "eh_proj")}
        tensors[f"{prefix}shared_head.norm.weight"] = own["norm"]
        for copy in ("embed_tokens", "shared_head.head"):
            tensors[f"{prefix}{copy}.weight"] = torch.zeros(SIZES["vocab_size"], HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    stated["num_hidden_layers"] = LAYERS
    if recipe == "qwen3_next":
        stated["layer_types"] = stated["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(stated))
    return larger.model, own


@pytest.mark.parametrize("recipe", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_mtp(tmp_path: Path, recipe: str) -> None:
    larger, own = write_model(tmp_path, recipe)
    with Harness(tmp_path, dtype="float32") as harness:
        wanted = [output.token_ids for output in harness.engine().run(PROMPTS, max_tokens=16)]
    reference = Reference(tmp_path)
    offset = 1.0 if recipe == "qwen3_next" else 0.0
    eps = reference.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (own[name] + offset)

    def follow(ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        both = torch.cat((norm(reference.embed(ids), "enorm"), norm(hidden, "hnorm")), dim=-1)
        x = both @ own["eh_proj"].t()
        return norm(run_layer(larger.layers[LAYERS], x, reference.config, larger.rotary_emb), "norm")

    def best(state: torch.Tensor) -> int:
        return int(reference.logits(state).argmax())

    def guess(known: list[int], count: int) -> list[int]:
        return chain(reference.hidden(known[:-1]), known[1:], count, follow, best)

    with HeadHarness(tmp_path, "mtp", 2) as harness:
        for limits in ({}, {"max_num_batched_tokens": 10}):
            found = harness.engine(**limits).run(PROMPTS, max_tokens=16)
            assert [output.token_ids for output in found] == wanted
            assert len(harness.proposed) > 10
            for known, made in harness.proposed:
                while made and made[-1] == -1:
                    made.pop()
                assert made == guess(known, len(made)), known
        harness.executor.call("check", ())


def test_a_model_without_such_a_layer(tiny_llama: Path) -> None:
    with pytest.raises(StartupError, match="mtp: .*has no weights of a head") as raised:
        HeadHarness(tiny_llama, "mtp", 1)
    assert str(tiny_llama) in str(raised.value)


@pytest.mark.parametrize("form", ["int8-weights", "fp8-blocks"])
def test_a_quantized_layer(tmp_path: Path, form: str) -> None:
    """Compare guesses of a quantized checkpoint with those of one with the weights that it means."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, "glm4_moe")
    tensors = load_file(plain / "model.safetensors")
    meant = quantized_checkpoint(plain, quantized, form)
    projection = f"model.layers.{LAYERS}.eh_proj.weight"  # stays as it is
    del meant[projection]
    written = {k: t for k, t in load_file(quantized / "model.safetensors").items() if ".eh_proj." not in k}
    save_file({**written, projection: tensors[projection]}, quantized / "model.safetensors", {"format": "pt"})
    save_file({**tensors, **meant}, plain / "model.safetensors", {"format": "pt"})
    found = []
    for folder in (plain, quantized):
        with HeadHarness(folder, "mtp", 2) as harness:
            harness.engine().run(PROMPTS, max_tokens=16)
            found.append({tuple(known): made for known, made in harness.proposed})
    same = [made[0] == found[0][known][0] for known, made in found[1].items() if known in found[0]]
    assert len(same) > 5  # texts part where activations are rounded too
    assert sum(same) > 0.6 * len(same)


def test_a_layer_that_nothing_says_how_to_read(tmp_path: Path) -> None:
    write_model(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.{LAYERS}.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match="predicts further tokens is quantized, and .*o_proj.weight_scale_inv"):
        HeadHarness(tmp_path, "mtp", 1)


def test_a_layer_without_its_projection(tmp_path: Path) -> None:
    write_model(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match="lack further.eh_proj.weight"):
        HeadHarness(tmp_path, "mtp", 1)
