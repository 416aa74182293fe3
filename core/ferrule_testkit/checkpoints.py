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
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
}
_GRANITE = {
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}


@dataclass(frozen=True)
class Recipe:
    """How to make one checkpoint: transformers' `model_type`, and what differs from `SIZES`."""

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def _recipe(model_type: str, **changes: Any) -> Recipe:
    return Recipe(model_type, changes)


# Architectures that Ferrule implements itself. Windows are short, so that texts of tests slide.
NATIVE: Mapping[str, Recipe] = {
    "llama": _recipe("llama"),
    "llama-tied": _recipe("llama", tie_word_embeddings=True, attention_bias=True, head_dim=32),
    "mistral": _recipe("mistral", sliding_window=12),
    "qwen2": _recipe("qwen2"),
    "qwen2-sliding": _recipe("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": _recipe("qwen3", head_dim=32),
    "opt": _recipe("opt", ffn_dim=96, tie_word_embeddings=True),
    "opt-postnorm": _recipe("opt", ffn_dim=96, do_layer_norm_before=False, word_embed_proj_dim=32),
    "gpt2": _recipe("gpt2", tie_word_embeddings=True),
    "gemma2": _recipe("gemma2", head_dim=16, sliding_window=12, query_pre_attn_scalar=24, tie_word_embeddings=True),
    "phi3": _recipe("phi3", sliding_window=12),
    "phi3-longrope": _recipe("phi3", original_max_position_embeddings=128, rope_parameters=_LONGROPE),
    "granite": _recipe("granite", **_GRANITE),
}


def tiny_config(name: str) -> Any:
    """The transformers configuration object of a recipe."""
    from transformers import AutoConfig

    recipe = RECIPES[name]
    return AutoConfig.for_model(recipe.model_type, **{**SIZES, **recipe.changes})


def tiny_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A random float32 model of transformers, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager")
    randomise(model, seed)
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


def tiny_checkpoint(name: str, folder: Path | str, *, seed: int = 0, shard_bytes: int | None = None) -> Path:
    """Write the checkpoint `name` to `folder` unless it is there already, and return the folder.

    `shard_bytes` limits the size of a weight file, which gives a sharded checkpoint with an index.
    """
    target = Path(folder)
    if (target / "complete").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    model = tiny_model(name, seed)
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


RECIPES: Mapping[str, Recipe] = NATIVE
