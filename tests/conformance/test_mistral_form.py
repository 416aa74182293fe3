"""A model gives the same in Mistral AI's own form and in that of transformers: what the published code computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrule.config import LoadConfig
from ferrule.errors import CheckpointError
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness, Output
from tests.mistral_form import mistral_form

PROMPT = [5, 17, 200, 31, 99, 250, 8, 77, 140, 21, 6, 9, 301, 44, 60, 61, 62, 63]  # longer than the windows
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 32.0, "alpha": 1.0, "apply_scale": True}
GROWTH = {"original_max_position_embeddings": 16, "beta": 0.3}
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "mixtral": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    "ministral": {},
    "ministral3": {"yarn": YARN, "llama_4_scaling": GROWTH},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generate(folder: Path, **options: Any) -> Output:
    with Harness(folder, dtype="float32", **options) as harness:
        return harness.engine().run([PROMPT], logprobs=3)[0]


def same(found: Output, expected: Output) -> None:
    assert found.error is None
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


@pytest.mark.parametrize("name", FORMS)
def test_both_forms_give_the_same(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint(name, tmp_path / name)
    changes = dict(FORMS[name])
    if name == "ministral":
        config = json.loads((folder / "config.json").read_text())
        widths = {"sliding_attention": config["sliding_window"], "full_attention": None}
        changes["sliding_window"] = [widths[kind] for kind in config["layer_types"]]
    same(generate(mistral_form(folder, tmp_path / "own", **changes)), generate(folder))


def test_tied_embeddings_and_parts_for_images(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    own = mistral_form(folder, tmp_path / "own", tied_embeddings=True, vision_encoder={"hidden_size": 8})
    weights = load_file(own / "consolidated.safetensors")
    del weights["output.weight"]
    images = ("vision_encoder.patch_conv.weight", "vision_language_adapter.w_in.weight", "patch_merger.x.weight")
    save_file(weights | {name: torch.ones(2, 2) for name in images}, own / "consolidated.safetensors")
    same(generate(own), generate(folder))


def test_fp8_weights_with_one_scale_for_each_matrix(tmp_path: Path) -> None:
    """Compute as the same numbers in the form of transformers, with its `quantization_config`."""
    folder = tiny_checkpoint("llama", tmp_path / "llama")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            weights[f"{name}_scale"] = scale
            tensor = (tensor / scale).to(torch.float8_e4m3fn)
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}
    own = mistral_form(folder, tmp_path / "own", quantization=quantization)
    scales = load_file(own / "consolidated.safetensors")
    renamed = {name.replace(".weight_scale", ".qscale_weight"): tensor for name, tensor in scales.items()}
    save_file(renamed, own / "consolidated.safetensors")
    same(generate(own), generate(folder))


def test_options_choose_the_form_where_a_folder_has_both(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "both")
    expected = generate(folder)
    mistral_form(folder, folder)
    weights = load_file(folder / "consolidated.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in weights.items()}, folder / "consolidated.safetensors")
    same(generate(folder), expected)
    load = LoadConfig(load_format="mistral", use_tqdm_on_load=False)
    assert generate(folder, config_format="mistral", sections={"load": load}).logprobs != expected.logprobs
    (folder / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"params\.json does not exist"):
        generate(folder, sections={"load": load})


def published(params: dict[str, Any], weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Return the logits of the last position, as mistral-inference computes them (transformer_layers.py, rope.py):
    [vocab].
    """
    dim, heads, key_heads = params["head_dim"], params["n_heads"], params["n_kv_heads"]
    angles = torch.outer(torch.arange(len(ids)), params["rope_theta"] ** (-torch.arange(0, dim, 2) / dim))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # [tokens, 1, dim / 2]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weight

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    x = weights["tok_embeddings.weight"][ids]
    for layer in range(params["n_layers"]):
        w = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"layers.{layer}.")}
        y = norm(x, w["attention_norm.weight"])
        q = rotate((y @ w["attention.wq.weight"].T).unflatten(-1, (heads, dim))).transpose(0, 1)
        k = rotate((y @ w["attention.wk.weight"].T).unflatten(-1, (key_heads, dim))).transpose(0, 1)
        v = (y @ w["attention.wv.weight"].T).unflatten(-1, (key_heads, dim)).transpose(0, 1)
        k, v = (part.repeat_interleave(heads // key_heads, 0) for part in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).flatten(1) @ w["attention.wo.weight"].T
        y = norm(x, w["ffn_norm.weight"])
        inner = torch.nn.functional.silu(y @ w["feed_forward.w1.weight"].T) * (y @ w["feed_forward.w3.weight"].T)
        x = x + inner @ w["feed_forward.w2.weight"].T
    return norm(x[-1], weights["norm.weight"]) @ weights["output.weight"].T


def test_it_computes_what_the_published_code_does(tmp_path: Path) -> None:
    own = mistral_form(tiny_checkpoint("llama", tmp_path / "llama"), tmp_path / "own")
    found = generate(own)
    params = json.loads((own / "params.json").read_text())
    logits = published(params, load_file(own / "consolidated.safetensors"), PROMPT)
    assert found.token_ids[0] == int(logits.argmax())
    assert found.logprobs[0].logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dim": 10**9}, "'dim' must be an integer from 1 to"),
        ({"n_heads": 0}, "'n_heads' must be an integer from 1 to"),
        ({"n_heads": 5}, "'n_heads' 5 must be a multiple of 'n_kv_heads' 2"),
        ({"n_layers": -3}, "'n_layers' must be an integer from 0 to"),
        ({"n_layers": "two"}, "'n_layers' must be an integer"),
        ({"rope_theta": float("nan")}, "'rope_theta' must be a positive number"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"yarn": {"factor": 4}}, "'yarn' needs 'factor' and 'original_max_position_embeddings'"),
        ({"yarn": [1]}, "'yarn' must be an object"),
        ({"moe": {"num_experts": 10**12, "num_experts_per_tok": 2}}, "'num_local_experts' must be an integer"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "route_every_n": 2}}, "'route_every_n'"),
        ({"sliding_window": [4, 8]}, "several widths"),
        ({"quantization": {"qformat_weight": "nvfp4"}}, "'quantization' this model has weights in 'nvfp4'"),
        ({"multimodal": {"whisper_model_args": {}}}, "hears or transcribes"),
        ({"dim": 128}, "'dim' is 128, but the weights"),
    ],
)
def test_params_that_cannot_be_are_one_error(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    own = mistral_form(tiny_checkpoint("llama", tmp_path / "llama"), tmp_path / "own", **changes)
    with pytest.raises(CheckpointError) as caught:
        generate(own)
    assert said in caught.value.message
