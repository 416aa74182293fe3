"""Models that transformers does not have: tiny checkpoints with the names of published files, and what is right.

The reference is plain torch, written from the papers and from what published files hold. It knows no cache: it computes
all logits of a text at once. `weights` of a layer says where each matrix is; all these models are Llama otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from ferrule_testkit.checkpoints import VOCAB_SIZE, write_tokenizer

HIDDEN, INNER, LAYERS, HEADS = 64, 96, 2, 4
DIM = HIDDEN // HEADS
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """The matrices of one layer [out, in], biases [out] or 0, and the weights of its norms."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]
    qkv_bias: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
    o_bias: Any = 0.0
    mlp_bias: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)  # of gate, up, down


@dataclass(frozen=True)
class Model:
    """A family: its config.json, its tensors' names and shapes, and how they are read."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # {} stands for the layer's number
    layer: Callable[[Callable[[str], torch.Tensor]], Layer]
    ends: tuple[str, str, str]  # names of embedding, last norm and head
    eps: float = 1e-6
    slopes: tuple[float, ...] = ()
    seed: int = 0


def llama_layer(get: Callable[[str], torch.Tensor], norms: tuple[str, str], biased: bool = False) -> Layer:
    """Return a layer with the names of Llama, which several of these models have."""
    attention = [get(f"model.layers.{{}}.self_attn.{name}_proj.weight") for name in "qkvo"]
    biases = [get(f"model.layers.{{}}.self_attn.{name}_proj.bias") for name in "qkvo"] if biased else [0.0] * 4
    mlp = [get(f"model.layers.{{}}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
    first, second = (get(f"model.layers.{{}}.{name}.weight") for name in norms)
    return Layer(*attention, *mlp, (first, second), (biases[0], biases[1], biases[2]), biases[3])


def internlm2_layer(get: Callable[[str], torch.Tensor]) -> Layer:
    """Return a layer whose `wqkv` has, for each key head, the rows of its query heads, of the key and of the value."""
    grouped = get("model.layers.{}.attention.wqkv.weight").view(2, HEADS // 2 + 2, DIM, HIDDEN)
    q, k, v = (
        grouped[:, :-2].reshape(-1, HIDDEN),
        grouped[:, -2].reshape(-1, HIDDEN),
        grouped[:, -1].reshape(-1, HIDDEN),
    )
    gate, down, up = (get(f"model.layers.{{}}.feed_forward.w{number}.weight") for number in (1, 2, 3))
    norms = get("model.layers.{}.attention_norm.weight"), get("model.layers.{}.ffn_norm.weight")
    return Layer(q, k, v, get("model.layers.{}.attention.wo.weight"), gate, up, down, norms)


def internlm3_layer(get: Callable[[str], torch.Tensor]) -> Layer:
    layer = llama_layer(get, LLAMA_NORMS, biased=True)
    mlp = tuple(get(f"model.layers.{{}}.mlp.{name}_proj.bias") for name in ("gate", "up", "down"))
    return Layer(**{**vars(layer), "mlp_bias": mlp})


def baichuan_layer(get: Callable[[str], torch.Tensor]) -> Layer:
    """Return a layer whose `W_pack` has all queries, then all keys, then all values."""
    q, k, v = get("model.layers.{}.self_attn.W_pack.weight").chunk(3)
    mlp = [get(f"model.layers.{{}}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")]
    norms = [get(f"model.layers.{{}}.{name}.weight") for name in LLAMA_NORMS]
    return Layer(q, k, v, get("model.layers.{}.self_attn.o_proj.weight"), *mlp, (norms[0], norms[1]))


def qwen_layer(get: Callable[[str], torch.Tensor]) -> Layer:
    """Return a layer that computes w1(x) * silu(w2(x)): the second matrix is the gate."""
    q, k, v = get("transformer.h.{}.attn.c_attn.weight").chunk(3)
    biases = get("transformer.h.{}.attn.c_attn.bias").chunk(3)
    up, gate, down = (get(f"transformer.h.{{}}.mlp.{name}.weight") for name in ("w1", "w2", "c_proj"))
    norms = get("transformer.h.{}.ln_1.weight"), get("transformer.h.{}.ln_2.weight")
    return Layer(q, k, v, get("transformer.h.{}.attn.c_proj.weight"), gate, up, down, norms, biases)


# ------------------------------------------------------------------------------------------------ the table

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
KEY_HEADS = 2  # of InternLM 2 and 3; the others have as many as query heads


def _llama_shapes(key_heads: int = HEADS, norms: tuple[str, str] = LLAMA_NORMS) -> dict[str, tuple[int, ...]]:
    mlp = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    kv = (key_heads * DIM, HIDDEN)
    attention = {"q": (HIDDEN, HIDDEN), "k": kv, "v": kv, "o": (HIDDEN, HIDDEN)}
    return {
        **{f"model.layers.{{}}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()},
        **{f"model.layers.{{}}.mlp.{name}_proj.weight": shape for name, shape in mlp.items()},
        **{f"model.layers.{{}}.{name}.weight": (HIDDEN,) for name in norms},
    }


def _with_biases(shapes: dict[str, tuple[int, ...]], *modules: str) -> dict[str, tuple[int, ...]]:
    biases = {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in shapes.items()
        if any(f"{module}_proj" in name for module in modules)
    }
    return {**shapes, **biases}


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "eos_token_id": 2,
}
_LLAMA = {
    **_SIZES,
    "intermediate_size": INNER,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_W_PACK = {
    **{name: shape for name, shape in _llama_shapes().items() if "self_attn.o" in name or "self_attn" not in name},
    "model.layers.{}.self_attn.W_pack.weight": (3 * HIDDEN, HIDDEN),
}
_YI_NORMS = ("ln1", "ln2")

MODELS: Mapping[str, Model] = {
    "internlm": Model(
        {**_LLAMA, "architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": True},
        _with_biases(_llama_shapes(), "q", "k", "v", "o"),
        lambda get: llama_layer(get, LLAMA_NORMS, biased=True),
        ENDS,
    ),
    "internlm2": Model(
        {
            **_LLAMA,
            "architectures": ["InternLM2ForCausalLM"],
            "model_type": "internlm2",
            "num_key_value_heads": KEY_HEADS,
            "bias": False,
            "rope_theta": 1000000,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        {
            "model.layers.{}.attention.wqkv.weight": ((HEADS + 2 * KEY_HEADS) * DIM, HIDDEN),
            "model.layers.{}.attention.wo.weight": (HIDDEN, HIDDEN),
            "model.layers.{}.feed_forward.w1.weight": (INNER, HIDDEN),
            "model.layers.{}.feed_forward.w2.weight": (HIDDEN, INNER),
            "model.layers.{}.feed_forward.w3.weight": (INNER, HIDDEN),
            "model.layers.{}.attention_norm.weight": (HIDDEN,),
            "model.layers.{}.ffn_norm.weight": (HIDDEN,),
        },
        internlm2_layer,
        ("model.tok_embeddings.weight", "model.norm.weight", "output.weight"),
    ),
    "internlm3": Model(
        {
            **_LLAMA,
            "architectures": ["InternLM3ForCausalLM"],
            "model_type": "internlm3",
            "num_key_value_heads": KEY_HEADS,
            "head_dim": DIM,
            "bias": True,
            "qkv_bias": True,
            "rope_theta": 50000000,
        },
        _with_biases(_llama_shapes(KEY_HEADS), "q", "k", "v", "o", "gate", "up", "down"),
        internlm3_layer,
        ENDS,
    ),
    "baichuan-7b": Model(
        {**_LLAMA, "architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan"}, _W_PACK, baichuan_layer, ENDS
    ),
    "baichuan-13b": Model(
        {
            **{key: value for key, value in _LLAMA.items() if key != "max_position_embeddings"},
            "architectures": ["BaichuanForCausalLM"],
            "model_type": "baichuan",
            "model_max_length": 256,
        },
        _W_PACK,
        baichuan_layer,
        ENDS,
        slopes=(0.25, 0.0625, 0.015625, 0.00390625),
    ),
    "qwen": Model(
        {
            **_SIZES,
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "intermediate_size": 2 * INNER,
            "kv_channels": DIM,
            "layer_norm_epsilon": 1e-6,
            "rotary_pct": 1.0,
            "rotary_emb_base": 10000,
            "seq_length": 256,
            "max_position_embeddings": 512,
            "no_bias": True,
            "tie_word_embeddings": False,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
        },
        {
            "transformer.h.{}.attn.c_attn.weight": (3 * HIDDEN, HIDDEN),
            "transformer.h.{}.attn.c_attn.bias": (3 * HIDDEN,),
            "transformer.h.{}.attn.c_proj.weight": (HIDDEN, HIDDEN),
            "transformer.h.{}.mlp.w1.weight": (INNER, HIDDEN),
            "transformer.h.{}.mlp.w2.weight": (INNER, HIDDEN),
            "transformer.h.{}.mlp.c_proj.weight": (HIDDEN, INNER),
            "transformer.h.{}.ln_1.weight": (HIDDEN,),
            "transformer.h.{}.ln_2.weight": (HIDDEN,),
        },
        qwen_layer,
        ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"),
    ),
    "yi": Model(
        {**_LLAMA, "architectures": ["YiForCausalLM"], "model_type": "Yi"},
        _llama_shapes(norms=_YI_NORMS),
        lambda get: llama_layer(get, _YI_NORMS),
        ENDS,
        seed=1,
    ),
}


# ------------------------------------------------------------------------------------------------ what is right


def write(name: str, folder: Path) -> Path:
    """Write a checkpoint with random weights, once; they are drawn like those of `ferrule_testkit.checkpoints`."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True)
    model = MODELS[name]
    draw = torch.Generator().manual_seed(model.seed)
    embedding, norm, head = model.ends
    shapes = {embedding: (VOCAB_SIZE, HIDDEN), norm: (HIDDEN,), head: (VOCAB_SIZE, HIDDEN)}
    for index in range(LAYERS):
        shapes.update((key.format(index), shape) for key, shape in model.shapes.items())
    tensors = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        vector = 0.2 * noise + (0.0 if key.endswith("bias") else 1.0)
        tensors[key] = vector if len(shape) == 1 else noise * (1.5 * shape[-1] ** -0.5)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config))
    write_tokenizer(folder)
    return folder


def logits_of(name: str, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from ids [tokens] to logits [tokens, vocab]."""
    model, tensors = MODELS[name], load_file(folder / "model.safetensors")
    embedding, norm, head = (tensors[key] for key in model.ends)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        x = embedding[ids]
        for index in range(LAYERS):
            layer = model.layer(lambda key, index=index: tensors[key.format(index)])
            x = x + attention(layer, rms(x, layer.norms[0], model.eps), model)
            y = rms(x, layer.norms[1], model.eps)
            gate, up, down = layer.mlp_bias
            x = x + (F.silu(y @ layer.gate.T + gate) * (y @ layer.up.T + up)) @ layer.down.T + down
        return rms(x, norm, model.eps) @ head.T

    return logits


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(layer: Layer, x: torch.Tensor, model: Model) -> torch.Tensor:
    tokens = len(x)
    q, k, v = (
        (x @ weight.T + bias).view(tokens, -1, DIM).transpose(0, 1)
        for weight, bias in zip((layer.q, layer.k, layer.v), layer.qkv_bias, strict=True)
    )
    position = torch.arange(tokens)
    if not model.slopes:
        config = model.config
        q, k = (turned(each, config.get("rope_theta") or config.get("rotary_emb_base") or 10000) for each in (q, k))
    k, v = (each.repeat_interleave(HEADS // len(each), 0) for each in (k, v))
    distance = position[:, None] - position
    scores = q @ k.transpose(1, 2) / math.sqrt(DIM)
    if model.slopes:
        scores = scores - torch.tensor(model.slopes).view(-1, 1, 1) * distance
    mixed = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
    return mixed.transpose(0, 1).reshape(tokens, -1) @ layer.o.T + layer.o_bias


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate [heads, tokens, dim]: feature i with feature i + dim / 2, as complex numbers."""
    angle = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(0, DIM, 2) / DIM)
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), dim=-1)
