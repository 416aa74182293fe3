"""The checkpoint `llama` of `ferrule_testkit.checkpoints`, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_llama(folder: Path, sizes: Mapping[str, Any], randomise: Callable[[torch.nn.Module], None]) -> None:
    """Write the configuration and the weights that transformers writes of the recipe `llama`.

    Most tests and kits need no other model, and the import of transformers takes ten times as long as this.
    """
    width, inner, heads, keys = (
        sizes[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head = width // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], width)}
    for number in range(sizes["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (heads * head, width),
            "self_attn.k_proj": (keys * head, width),
            "self_attn.v_proj": (keys * head, width),
            "self_attn.o_proj": (width, heads * head),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (sizes["vocab_size"], width)}
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes.values()]
    randomise(torch.nn.ParameterList(parameters))
    tensors = {name: parameter.detach() for name, parameter in zip(shapes, parameters, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **sizes,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": head,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "use_cache": True,
    }
    (folder / "config.json").write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n", encoding="utf-8")
