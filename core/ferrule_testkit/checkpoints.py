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

from ferrule_testkit.row_recipes import COMPOSITE, MIXED, MLA, ROWS, SEEDS

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
_GROWING: dict[str, Any] = {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
_ALPHA: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 3.0, "factor": 1.0}
_LOCAL: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}
_SHARING: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 12,
    "num_hidden_layers": 4,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_SPARSE = [0.9, 0.0, 0.8, 0.0]
_KEYS_ARE_VALUES: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 3,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_MLA: dict[str, Any] = {**MLA, "first_k_dense_replace": 1}
_GROUPED: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
_YARN_MSCALE: dict[str, Any] = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}


@dataclass(frozen=True)
class Recipe:
    """A recipe for one checkpoint: transformers' `model_type`, what differs from `SIZES`, and how its weights are
    drawn.

    Random matrices have `gain` times the size that keeps the size of the activations they multiply. `attention` is the
    implementation of transformers that computes this model correctly.
    """

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attention: str = "eager"
    gain: float = 1.5


def _recipe(model_type: str, seed: int = 0, attention: str = "eager", gain: float = 1.5, **changes: Any) -> Recipe:
    return Recipe(model_type, changes, seed, attention, gain)


_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

# Architectures whose layers keep states, that Ferrule implements itself.
STATES: Mapping[str, Recipe] = {
    "mamba": _recipe("mamba", expand=2),
    "falcon_mamba": _recipe("falcon_mamba"),
    "mamba2": _recipe("mamba2", num_heads=8, head_dim=16, n_groups=2, state_size=16),
    "bamba": _recipe("bamba", num_hidden_layers=3, attn_layer_indices=[1], **_MAMBA2),
    "falcon_h1": _recipe(
        "falcon_h1",
        mamba_d_ssm=128,
        ssm_multipliers=[0.8, 0.9, 1.1, 1.2, 0.7],
        mlp_multipliers=[0.9, 0.8],
        key_multiplier=0.8,
        ssm_in_multiplier=1.2,
        lm_head_multiplier=0.9,
        embedding_multiplier=1.5,
        **_MAMBA2,
    ),
    "falcon_h1-norm": _recipe(
        "falcon_h1", mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=False, **_MAMBA2
    ),
    "granitemoehybrid": _recipe(
        "granitemoehybrid",
        seed=1,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        shared_intermediate_size=48,
        **_MAMBA2,
        **_GRANITE,
    ),
    "granitemoehybrid-dense": _recipe(
        "granitemoehybrid",
        layer_types=["full_attention", "linear_attention"],
        num_local_experts=0,
        shared_intermediate_size=48,
        position_embedding_type="rope",
        **_MAMBA2,
        **_GRANITE,
    ),
    "jamba": _recipe(
        "jamba",
        num_hidden_layers=3,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
        num_experts=4,
    ),
    "nemotron_h": _recipe(
        "nemotron_h",
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        head_dim=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_latent_size=24,
        mamba_num_heads=8,
        time_step_min=1e-12,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
    ),
    "zamba2": _recipe(
        "zamba2",
        gain=1.0,  # adapters add to projections: attention would be too sharp for float32
        num_hidden_layers=4,
        layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid"],
        num_key_value_heads=4,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=16,
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=8,
        use_mem_rope=True,
        time_step_min=1e-12,  # transformers has it as the least width in prefill, and not in decoding
        tie_word_embeddings=True,
    ),
    "lfm2": _recipe("lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "qwen3_5": _recipe("qwen3_5_text", **_DELTA),
    "qwen3_5_moe": _recipe("qwen3_5_moe_text", seed=1, shared_expert_intermediate_size=32, **_DELTA, **_EXPERTS),
    "qwen3_next": _recipe("qwen3_next", shared_expert_intermediate_size=32, **_DELTA, **_EXPERTS),
}

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
    "gemma2": _recipe("gemma2", head_dim=16, query_pre_attn_scalar=24, tie_word_embeddings=True, **MIXED),
    "phi3": _recipe("phi3", sliding_window=12),
    "phi3-longrope": _recipe("phi3", original_max_position_embeddings=128, rope_parameters=_LONGROPE),
    "phi3-longrope-beyond": _recipe("phi3", original_max_position_embeddings=8, rope_parameters=_LONGROPE),
    "granite": _recipe("granite", **_GRANITE),
    "deepseek_v2": _recipe(
        "deepseek_v2", **{**_MLA, **_GROUPED, "q_lora_rank": None, "topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3": _recipe("deepseek_v3", **{**_MLA, **_GROUPED, "rope_parameters": _YARN_MSCALE}),
    "deepseek_v32": _recipe(
        "deepseek_v32",
        **{**_MLA, **_GROUPED, "q_lora_rank": 24, "index_topk": 10, "index_n_heads": 8, "index_head_dim": 16},
    ),
    "glm_moe_dsa": _recipe(
        "glm_moe_dsa",
        num_hidden_layers=3,
        indexer_types=["full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        **{**_MLA, **_GROUPED, "q_lora_rank": 24, "index_topk": 10, "index_n_heads": 8, "index_head_dim": 16},
    ),
    "dots1": _recipe("dots1", n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "ernie4_5_moe": _recipe("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, **_EXPERTS),
    "glm4_moe": _recipe("glm4_moe", n_routed_experts=4, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "glm4_moe_lite": _recipe("glm4_moe_lite", **{**_MLA, **_GROUPED}),
    "granitemoe": _recipe("granitemoe", num_local_experts=4, **_GRANITE),
    "gpt_oss": _recipe("gpt_oss", head_dim=16, num_local_experts=4, rope_parameters=_YARN, **MIXED),
    "minimax_m2": _recipe("minimax_m2", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _recipe("olmoe", seed=2, **_EXPERTS),
    "hunyuan_v1_moe": _recipe("hunyuan_v1_moe", num_experts=4, moe_topk=2, head_dim=16),
    "llama4": _recipe(
        "llama4_text",
        seed=1,
        head_dim=16,
        intermediate_size_mlp=80,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        floor_scale=8,
        attention_chunk_size=12,
    ),
    "mixtral": _recipe("mixtral", num_local_experts=4),
    "phimoe": _recipe("phimoe", num_local_experts=4),
    "qwen2_moe": _recipe("qwen2_moe", shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3_moe": _recipe("qwen3_moe", **_EXPERTS),
    **STATES,
    "apertus": _recipe("apertus", rope_parameters=_LLAMA3),
    "arcee": _recipe("arcee"),
    "bloom": _recipe("bloom", num_attention_heads=6, hidden_size=96),
    "cohere": _recipe("cohere", logit_scale=0.9, tie_word_embeddings=True),
    "cohere-heads": _recipe("cohere", logit_scale=0.9, use_qk_norm=True),
    "cohere2": _recipe("cohere2", logit_scale=0.9, **MIXED),
    "ernie4_5": _recipe("ernie4_5", head_dim=16),
    "exaone4": _recipe("exaone4", **MIXED),
    "exaone4-full": _recipe("exaone4", sliding_window=None, layer_types=2 * ["full_attention"]),
    "falcon": _recipe("falcon"),
    "falcon-new": _recipe("falcon", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=96),
    "falcon-11b": _recipe("falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon-rw": _recipe("falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True, attention="sdpa"),
    "gemma": _recipe("gemma", head_dim=16, tie_word_embeddings=True),
    "gemma3_text": _recipe("gemma3_text", head_dim=16, query_pre_attn_scalar=24, rope_parameters=_LOCAL, **MIXED),
    "gemma3n_text": _recipe("gemma3n_text", laurel_rank=8, activation_sparsity_pattern=_SPARSE, **_SHARING),
    "gemma4_text": _recipe("gemma4_text", global_head_dim=32, use_double_wide_mlp=True, **_SHARING),
    "gemma4_text-plain": _recipe("gemma4_text", hidden_size_per_layer_input=0, **_KEYS_ARE_VALUES),
    "gemma4_text-experts": _recipe(
        "gemma4_text",
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        **_KEYS_ARE_VALUES,
    ),
    "glm": _recipe("glm", head_dim=16),
    "glm4": _recipe("glm4", head_dim=16),
    "gpt_bigcode": _recipe("gpt_bigcode"),
    "gpt_bigcode-heads": _recipe("gpt_bigcode", multi_query=False),
    "gpt_neox": _recipe("gpt_neox"),
    "gpt_neox-serial": _recipe("gpt_neox", seed=1, use_parallel_residual=False, attention_bias=False),
    "gptj": _recipe("gptj", rotary_dim=8),
    "helium": _recipe("helium", head_dim=16),
    "hunyuan_v1_dense": _recipe("hunyuan_v1_dense", head_dim=16, rope_parameters=_ALPHA),
    "ministral": _recipe("ministral", head_dim=16, **MIXED),
    "ministral3": _recipe("ministral3", head_dim=16, rope_parameters=_GROWING),
    "mpt": _recipe("mpt", d_model=64, n_layers=2, n_heads=4, max_seq_len=256, attn_config={"clip_qkv": 1.0}),
    "nemotron": _recipe("nemotron", seed=1),
    "olmo": _recipe("olmo", clip_qkv=1.0),
    "olmo2": _recipe("olmo2"),
    "olmo3": _recipe("olmo3", rope_parameters=_LOCAL, **MIXED),
    "phi": _recipe("phi"),
    "phi-heads": _recipe("phi", qk_layernorm=True),
    "seed_oss": _recipe("seed_oss", head_dim=16),
    "smollm3": _recipe("smollm3", no_rope_layer_interval=2),
    "stablelm": _recipe("stablelm", use_qkv_bias=True),
    "stablelm-heads": _recipe("stablelm", qk_layernorm=True, use_parallel_residual=True),
    "starcoder2": _recipe("starcoder2", sliding_window=12),
}

# Architectures that give vectors and generate nothing.
ENCODERS: Mapping[str, Recipe] = {"bert-encoder": _recipe("bert")}

# Architectures that run through transformers.
TRANSFORMERS: Mapping[str, Recipe] = {
    "flex_olmo": _recipe("flex_olmo", **_EXPERTS),
    "granite_swa": _recipe("granite_swa", **_GRANITE, **MIXED),
    "jais2": _recipe("jais2"),
    "jetmoe": _recipe("jetmoe", seed=1, kv_channels=16, num_local_experts=4),
    "mimo_v2_flash": _recipe("mimo_v2_flash", n_routed_experts=4, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "minicpm3": _recipe("minicpm3", **_MLA),
    "modernbert-decoder": _recipe("modernbert-decoder", **MIXED),
    "solar_open": _recipe("solar_open", n_routed_experts=4, n_group=1, topk_group=1, head_dim=16, **_EXPERTS),
    "nanochat": _recipe("nanochat"),
    "persimmon": _recipe("persimmon"),
    "vaultgemma": _recipe("vaultgemma", head_dim=16, query_pre_attn_scalar=24, **MIXED),
    **{kind: Recipe(kind, changes, SEEDS.get(kind, 0)) for kind, changes in (*ROWS.items(), *COMPOSITE.items())},
}


def tiny_config(name: str) -> Any:
    """Return the transformers configuration object of a recipe."""
    from transformers import AutoConfig

    recipe = RECIPES[name]
    values = {key: value for key, value in {**SIZES, **recipe.changes}.items() if value is not ...}
    return AutoConfig.for_model(recipe.model_type, **values)


def tiny_model(name: str, seed: int | None = None) -> torch.nn.Module:
    """Return a random float32 model of transformers, in evaluation mode. The seed is the recipe's unless given."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    config, attention = tiny_config(name), RECIPES[name].attention
    model: torch.nn.Module
    if name in ENCODERS:
        model = AutoModel.from_config(config, attn_implementation=attention, add_pooling_layer=False)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomise(model, RECIPES[name].seed if seed is None else seed, RECIPES[name].gain)
    return model.to(torch.float32).eval()


def randomise(model: torch.nn.Module, seed: int, gain: float = 1.5) -> None:
    """Replace all weights. Vectors keep their meaning (ones stay near one) and get noise, so that none is neutral."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * (gain * parameter.shape[-1] ** -0.5))


def tiny_checkpoint(name: str, folder: Path | str, *, seed: int | None = None, shard_bytes: int | None = None) -> Path:
    """Write the checkpoint `name` to `folder` unless it is there already, and return the folder.

    `shard_bytes` limits the size of a weight file, which gives a sharded checkpoint with an index.
    """
    target = Path(folder)
    if (target / "complete").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    if name == "llama" and shard_bytes is None:
        from ferrule_testkit.tiny_llama import write_llama

        drawn = RECIPES[name].seed if seed is None else seed
        write_llama(target, SIZES, lambda model: randomise(model, drawn))
    else:
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
    """Write a byte-level BPE tokenizer with 300 entries (5 special, 256 bytes, 39 merges) and a ChatML template."""
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


RECIPES: Mapping[str, Recipe] = {**NATIVE, **TRANSFORMERS, **ENCODERS}
