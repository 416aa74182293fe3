"""Tiny random checkpoints in Hugging Face's layout: a folder with weights, configuration and a small tokenizer.

The weights are drawn so that greedy decoding is decisive: the two best logits of a position differ by far more than
rounding does, so that two correct implementations agree on every token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 320  # logits width; the tokenizer has fewer entries, as many real models do

# What most configuration classes call these things; a class that has no such field ignores the value.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}


@dataclass(frozen=True)
class Recipe:
    """How to make one checkpoint: transformers' `model_type`, what differs from `SIZES`, and the weights' seed."""

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def _recipe(model_type: str, seed: int = 0, **changes: Any) -> Recipe:
    return Recipe(model_type, changes, seed)


# Architectures that Ferrule implements itself. Windows are short, so that texts of tests slide.
NATIVE: Mapping[str, Recipe] = {
    "llama": _recipe("llama"),
    "llama-tied": _recipe("llama", tie_word_embeddings=True, attention_bias=True, head_dim=32),
    "llama-llama3": _recipe("llama", rope_parameters=_LLAMA3),
    "mistral": _recipe("mistral", sliding_window=12),
    "qwen2": _recipe("qwen2"),
    "qwen2-sliding": _recipe("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen2-yarn": _recipe("qwen2", rope_parameters=_YARN),
    "qwen3": _recipe("qwen3", head_dim=32),
    "opt": _recipe("opt", ffn_dim=96, tie_word_embeddings=True),
    "opt-postnorm": _recipe("opt", ffn_dim=96, do_layer_norm_before=False, word_embed_proj_dim=32),
    "gpt2": _recipe("gpt2", tie_word_embeddings=True),
    "gemma2": _recipe("gemma2", head_dim=16, query_pre_attn_scalar=24, tie_word_embeddings=True, **_MIXED),
    "phi3": _recipe("phi3", sliding_window=12),
    "phi3-longrope": _recipe("phi3", original_max_position_embeddings=128, rope_parameters=_LONGROPE),
    "phi3-longrope-beyond": _recipe("phi3", original_max_position_embeddings=8, rope_parameters=_LONGROPE),
    "granite": _recipe("granite", **_GRANITE),
}

# Architectures that run through transformers.
TRANSFORMERS: Mapping[str, Recipe] = {
    "apertus": _recipe("apertus", rope_parameters=_LLAMA3),
    "arcee": _recipe("arcee"),
    "cohere": _recipe("cohere", logit_scale=0.9, use_qk_norm=True),
    "cohere2": _recipe("cohere2", logit_scale=0.9, **_MIXED),
    "deepseek_v3": _recipe("deepseek_v3", **_MLA),
    "dots1": _recipe("dots1", n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "ernie4_5": _recipe("ernie4_5", head_dim=16),
    "ernie4_5_moe": _recipe("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, **_EXPERTS),
    "exaone4": _recipe("exaone4", **_MIXED),
    "flex_olmo": _recipe("flex_olmo", **_EXPERTS),
    "gemma": _recipe("gemma", head_dim=16),
    "gemma4_text": _recipe("gemma4_text", head_dim=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0, **_MIXED),
    "gemma3_text": _recipe("gemma3_text", head_dim=16, query_pre_attn_scalar=24, **_MIXED),
    "glm": _recipe("glm", head_dim=16),
    "glm4": _recipe("glm4", head_dim=16),
    "glm4_moe": _recipe("glm4_moe", n_routed_experts=4, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "granite_swa": _recipe("granite_swa", **_GRANITE, **_MIXED),
    "gpt_bigcode": _recipe("gpt_bigcode"),
    "gpt_neox": _recipe("gpt_neox"),
    "gpt_oss": _recipe("gpt_oss", head_dim=16, num_local_experts=4, rope_parameters=_YARN, **_MIXED),
    "granitemoe": _recipe("granitemoe", num_local_experts=4, **_GRANITE),
    "helium": _recipe("helium", head_dim=16),
    "hunyuan_v1_dense": _recipe("hunyuan_v1_dense", head_dim=16),
    "jais2": _recipe("jais2"),
    "jetmoe": _recipe("jetmoe", seed=1, kv_channels=16, num_local_experts=4),
    "mimo_v2_flash": _recipe("mimo_v2_flash", n_routed_experts=4, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "minicpm3": _recipe("minicpm3", **_MLA),
    "minimax_m2": _recipe("minimax_m2", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "modernbert-decoder": _recipe("modernbert-decoder", **_MIXED),
    "solar_open": _recipe("solar_open", n_routed_experts=4, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "ministral": _recipe("ministral", head_dim=16, **_MIXED),
    "mixtral": _recipe("mixtral", num_local_experts=4),
    "nanochat": _recipe("nanochat"),
    "nemotron": _recipe("nemotron", seed=1),
    "olmo": _recipe("olmo"),
    "olmo2": _recipe("olmo2"),
    "olmo3": _recipe("olmo3", **_MIXED),
    "olmoe": _recipe("olmoe", seed=2, **_EXPERTS),
    "persimmon": _recipe("persimmon"),
    "phi": _recipe("phi"),
    "phimoe": _recipe("phimoe", num_local_experts=4),
    "qwen2_moe": _recipe("qwen2_moe", shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3_moe": _recipe("qwen3_moe", **_EXPERTS),
    "seed_oss": _recipe("seed_oss", head_dim=16),
    "smollm3": _recipe("smollm3"),
    "starcoder2": _recipe("starcoder2"),
    "vaultgemma": _recipe("vaultgemma", head_dim=16, query_pre_attn_scalar=24, **_MIXED),
}


def tiny_config(name: str) -> Any:
    """The transformers configuration object of a recipe."""
    from transformers import AutoConfig

    recipe = RECIPES[name]
    return AutoConfig.for_model(recipe.model_type, **{**SIZES, **recipe.changes})


def tiny_model(name: str, seed: int | None = None) -> torch.nn.Module:
    """A random float32 model of transformers, in evaluation mode. The seed is the recipe's unless given."""
    import torch
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager")
    randomise(model, RECIPES[name].seed if seed is None else seed)
    return model.to(torch.float32).eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Replace all weights. Vectors keep their meaning (ones stay near one) and get noise, so that none is neutral."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * (1.5 * parameter.shape[-1] ** -0.5))


def tiny_checkpoint(name: str, folder: Path | str, *, seed: int | None = None, shard_bytes: int | None = None) -> Path:
    """Write the checkpoint `name` to `folder` unless it is there already, and return the folder.

    `shard_bytes` limits the size of a weight file, which gives a sharded checkpoint with an index.
    """
    target = Path(folder)
    if (target / "complete").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    model: Any = tiny_model(name, seed)
    model.save_pretrained(target, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    write_tokenizer(target)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (target / "generation_config.json").write_text(json.dumps(generation))
    (target / "complete").touch()
    return target


# ------------------------------------------------------------------------------------------------- tokenizer

_SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The answer is Paris.",
    "You are a helpful assistant. Please tell me about the weather in the other town and then stop.",
    "user system assistant content role hello world",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with 300 entries (5 special, 256 bytes, 39 merges) and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": SIZES["max_position_embeddings"],
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


RECIPES: Mapping[str, Recipe] = {**NATIVE, **TRANSFORMERS}
