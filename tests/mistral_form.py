"""Checkpoints in Mistral AI's own form, made of those in the form of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_NAMES = (
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^model\.norm\.", "norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.", ""),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.block_sparse_moe\.", ".feed_forward."),
    (r"\.mlp\.gate\.", ".feed_forward.gate."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
)


def mistral_form(folder: Path, target: Path, **changes: Any) -> Path:
    """Write params.json and consolidated.safetensors for the checkpoint in `folder`; `changes` are of params.json."""
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": head_dim,
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
    }
    (target / "params.json").write_text(json.dumps({**params, **changes}))
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if re.search(r"\.[qk]_proj\.weight$", name):
            tensor = tensor.view(-1, 2, head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        weights.update(_apart(name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "consolidated.safetensors")
    return target


def _apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each expert by itself, where the file has all of a layer in one tensor."""
    if name.endswith("experts.gate_up_proj"):
        halves = dict(zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True))
    elif name.endswith("experts.down_proj"):
        halves = {"w2": tensor}
    else:
        return {name: tensor}
    layer = name.rpartition("experts.")[0].replace(".mlp.", ".feed_forward.")
    return {f"{layer}experts.{i}.{half}.weight": part[i] for half, part in halves.items() for i in range(len(part))}
