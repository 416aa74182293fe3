"""The architectures of llama.cpp as our models: a table, and how metadata becomes a ``config.json``.

Keys and names of tensors: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py

llama.cpp's names of tensors are the same for all architectures, and so are those of our layers: one list of names
serves all, and a row of the table says what an architecture has of its own. Only rows of matrices are moved, so
quantized tensors are moved as they are. All quantized types become integers with a scale and an offset for each 16
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrule.errors import CheckpointError, nearest
from ferrule_files.gguf.reader import FLOATS, GgufModel

_SIGMOID = 2  # of `expert_gating_func`


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture. `model` is the name of ours, `sparse` of the one with experts where that is another.

    `config` maps names of a ``config.json`` to keys that `KEYS` does not have; `fixed` has values that no key states.
    `names` maps tensors that `ferrule_files.gguf.names` has under other names. `paired`: features of queries and keys
    that are turned together are neighbours in the file, and half a head apart in our model. `norms_more`: weights of
    norms are stored with one added. `biased_inputs`: `attention_bias` says nothing of the output projection. `tiled`:
    see `ferrule_files.gguf.names.ValueHeads`.
    """

    model: str
    sparse: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norms_more: bool = False
    tiled: bool = False
    biased_inputs: bool = False


NEXT_LAYERS = "num_nextn_predict_layers"
# What a config.json calls a number, and the key under the architecture's name.
KEYS: Mapping[str, str] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "clip_qkv": "attention.clamp_kqv",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    NEXT_LAYERS: "nextn_predict_layers",
}
_SSM = {"conv_kernel": "ssm.conv_kernel", "state_size": "ssm.state_size", "intermediate_size": "ssm.inner_size"}
_DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_LATENT = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_AROUND = {  # GLM-4's own names, which its model renames
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GELU = {"hidden_act": "gelu_pytorch_tanh"}
_RENORMALISED = {"norm_topk_prob": True}

ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture(model="ArceeForCausalLM", paired=True),
    "bloom": Architecture(model="BloomForCausalLM"),
    "cohere2": Architecture(model="Cohere2ForCausalLM", config={"logit_scale": "logit_scale"}),
    "command-r": Architecture(model="CohereForCausalLM", config={"logit_scale": "logit_scale"}),
    "deepseek2": Architecture(model="DeepseekV2ForCausalLM", config=_LATENT),
    "dots1": Architecture(model="Dots1ForCausalLM"),
    "ernie4_5": Architecture(model="Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        model="Ernie4_5_MoeForCausalLM",
        config={
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        fixed={**_RENORMALISED, "first_k_dense_replace": 0},
    ),
    "exaone4": Architecture(model="Exaone4ForCausalLM", fixed={"sliding_window": None}),
    "falcon": Architecture(model="FalconForCausalLM"),
    "gemma": Architecture(model="GemmaForCausalLM", norms_more=True),
    "gemma2": Architecture(model="Gemma2ForCausalLM", names=_SANDWICH, norms_more=True),
    "gemma3": Architecture(
        model="Gemma3ForCausalLM",
        config={"rope_local_base_freq": "rope.freq_base_swa"},
        names=_SANDWICH,
        norms_more=True,
    ),
    "glm4": Architecture(model="Glm4ForCausalLM", names=_AROUND, biased_inputs=True),
    "glm4moe": Architecture(model="Glm4MoeForCausalLM", biased_inputs=True),
    "gpt-oss": Architecture(model="GptOssForCausalLM", fixed=_RENORMALISED),
    "gpt2": Architecture(model="GPT2LMHeadModel", fixed=_GELU),
    "gptneox": Architecture(model="GPTNeoXForCausalLM", fixed={"hidden_act": "gelu"}),
    "granite": Architecture(model="GraniteForCausalLM", config=_SCALES, paired=True),
    "granitemoe": Architecture(
        model="GraniteMoeForCausalLM",
        config={**_SCALES, "shared_intermediate_size": "expert_shared_feed_forward_length"},
        fixed=_RENORMALISED,
        paired=True,
    ),
    "hunyuan-dense": Architecture(model="HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture(
        model="HunYuanMoEV1ForCausalLM",
        config={"num_shared_expert": "expert_shared_count"},
        fixed=_RENORMALISED,
    ),
    "internlm2": Architecture(model="InternLM2ForCausalLM", paired=True),
    "llama": Architecture(model="LlamaForCausalLM", sparse="MixtralForCausalLM", fixed=_RENORMALISED, paired=True),
    "mamba": Architecture(model="MambaForCausalLM", config={**_SSM, "time_step_rank": "ssm.time_step_rank"}),
    "mamba2": Architecture(
        model="Mamba2ForCausalLM",
        config={**_SSM, "num_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count"},
    ),
    "minimax-m2": Architecture(model="MiniMaxM2ForCausalLM", fixed=_RENORMALISED),
    "mistral3": Architecture(model="Ministral3ForCausalLM", fixed={"sliding_window": None}, paired=True),
    "mpt": Architecture(model="MptForCausalLM"),
    "nemotron": Architecture(model="NemotronForCausalLM", norms_more=True),
    "olmo": Architecture(model="OlmoForCausalLM", paired=True),
    "olmo2": Architecture(model="Olmo2ForCausalLM"),
    "olmoe": Architecture(model="OlmoeForCausalLM", fixed={"norm_topk_prob": False}),
    "phi2": Architecture(model="PhiForCausalLM", fixed=_GELU),
    "phi3": Architecture(model="Phi3ForCausalLM"),
    "phimoe": Architecture(model="PhimoeForCausalLM"),
    "qwen2": Architecture(model="Qwen2ForCausalLM"),
    "qwen2moe": Architecture(model="Qwen2MoeForCausalLM", fixed={"norm_topk_prob": False}),
    "qwen3": Architecture(model="Qwen3ForCausalLM"),
    "qwen35": Architecture(model="Qwen3_5ForCausalLM", config=_DELTA, norms_more=True, tiled=True),
    "qwen35moe": Architecture(model="Qwen3_5MoeForCausalLM", config=_DELTA, norms_more=True, tiled=True),
    "qwen3next": Architecture(
        model="Qwen3NextForCausalLM",
        config=_DELTA,
        fixed={**_RENORMALISED, "linear_interleaved": False},
        norms_more=True,
    ),
    "qwen3moe": Architecture(model="Qwen3MoeForCausalLM", fixed=_RENORMALISED),
    "seed_oss": Architecture(model="SeedOssForCausalLM", biased_inputs=True),
    "smollm3": Architecture(model="SmolLM3ForCausalLM", paired=True),
    "stablelm": Architecture(model="StableLmForCausalLM"),
    "starcoder": Architecture(model="GPTBigCodeForCausalLM", fixed=_GELU),
    "starcoder2": Architecture(model="Starcoder2ForCausalLM", fixed=_GELU),
    "xverse": Architecture(model="XverseForCausalLM", paired=True),
}
_STATES = ("mamba", "mamba2")
_NOT_OF_STATES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # files may state zeros
# Architectures whose rotation, where the file has no base for it, is not there at all.
_UNTURNED = ("bloom", "gpt2", *_STATES, "mpt", "starcoder")
# llama.cpp knows the large sizes of Gemma by their layers: their scores are scaled by the model's width for each head.
_WIDE_GEMMA = {"gemma2": 46, "gemma3": 62}


def find(model: GgufModel) -> Architecture:
    """Return the architecture of a file. Raises CheckpointError for one that is not in the table."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{model.file}: models of the architecture {name!r} are not read from GGUF files."
            f"{nearest(name, ARCHITECTURES)}",
            f"Those that are: {', '.join(ARCHITECTURES)}.",
        )
    return ARCHITECTURES[name]


def read_config(model: GgufModel) -> dict[str, Any]:
    """Return the ``config.json`` that describes the model.

    Raises CheckpointError for metadata that is missing or wrong.
    """
    architecture = find(model)
    config: dict[str, Any] = {
        "model_type": model.architecture,
        "vocab_size": _vocabulary(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        **_biases(model, architecture),
    }
    unused = _NOT_OF_STATES if model.architecture in _STATES else ()
    for name, key in {**KEYS, **architecture.config}.items():
        value = _number(model, key)
        if value is not None and not (value == 0 and name in unused):
            config[name] = value
    _check_numbers(model, config)
    model_name = architecture.sparse if architecture.sparse and config.get("num_experts") else architecture.model
    config["architectures"] = [model_name]
    kinds = model.own("attention.sliding_window_pattern", list)
    if kinds is not None and all(isinstance(kind, bool) for kind in kinds):
        config["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    config = {**architecture.fixed, **config}
    _check_further(model, config)
    if config.get("num_experts") == 0:
        del config["num_experts"]
    _add_own(model, config)
    if model.architecture not in _UNTURNED:
        _add_rotation(model, config)
    config["dtype"] = _dtype(model)
    return config


def _vocabulary(model: GgufModel) -> int:
    table = model.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{model.file} has no tensor 'token_embd.weight': it is not a language model.")
    return table.shape[0]


def _number(model: GgufModel, key: str) -> Any:
    """Return a number or truth value, or None. Raises CheckpointError for a list that differs between layers."""
    value = model.own(key, (int, float, bool, list))
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(
            f"{model.file}: '{model.architecture}.{key}' differs between layers, which is not implemented."
        )
    return value[0]


def _check_further(model: GgufModel, config: dict[str, Any]) -> None:
    """Subtract the layers that predict further tokens from the number of layers.

    Raises CheckpointError where no other layers are left.
    """
    further = config.get(NEXT_LAYERS) or 0
    if type(further) is not int or not 0 <= further < config["num_hidden_layers"]:
        key = f"{model.architecture}.{KEYS[NEXT_LAYERS]}"
        raise CheckpointError(f"{model.file}: {key!r} must be less than the number of blocks, not {further!r:.40}.")
    config["num_hidden_layers"] -= further  # they are counted among the blocks


def _check_numbers(model: GgufModel, config: dict[str, Any]) -> None:
    """Raise CheckpointError unless the numbers are present on which all names and shapes depend.

    The number of heads of keys and values is filled in where a file leaves it out.
    """
    counts = () if model.architecture in _STATES else ("num_attention_heads",)
    for name in ("hidden_size", "num_hidden_layers", *counts):
        value = config.get(name)
        if type(value) is not int or value < 1:
            key = f"{model.architecture}.{KEYS[name]}"
            raise CheckpointError(f"{model.file}: {key!r} must be a positive integer, not {value!r:.40}.")
    if counts and "num_key_value_heads" not in config:  # files may leave it out where it is the same
        config["num_key_value_heads"] = config["num_attention_heads"]


def _biases(model: GgufModel, architecture: Architecture) -> dict[str, bool]:
    """Return which projections have biases, under all the names that model families have for that."""

    def has(*names: str) -> bool:
        return any(f"blk.0.{name}.bias" in model.tensors for name in names)

    inputs, output = has("attn_q", "attn_qkv"), has("attn_output")
    return {
        **dict.fromkeys(("use_qkv_bias", "qkv_bias", "use_bias", "bias"), inputs),
        "attention_bias": inputs and (output or architecture.biased_inputs),
        "attention_out_bias": output,
        "mlp_bias": has("ffn_up"),
    }


def _dtype(model: GgufModel) -> str:
    """Return the dtype in which most bytes of the file are; quantized ones are computed with in bfloat16."""
    counts: dict[str, int] = {}
    for info in model.tensors.values():
        counts[info.type.name] = counts.get(info.type.name, 0) + info.num_bytes
    most = max(counts, key=lambda name: counts[name])
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _add_own(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the values that some architectures state in their own way, or not at all."""
    has = model.tensors.__contains__
    config["use_qk_norm"] = config["qk_layernorm"] = has("blk.0.attn_q_norm.weight")
    match model.architecture:
        case "gemma2" | "gemma3":
            wide = config.get("num_hidden_layers") == _WIDE_GEMMA[model.architecture]
            width = config["hidden_size"] // config["num_attention_heads"] if wide else config.get("head_dim")
            config["query_pre_attn_scalar"] = width
        case "falcon":
            two = has("blk.0.attn_norm_2.weight")
            one = config.get("num_key_value_heads") == 1
            config.update(new_decoder_architecture=two or not one, multi_query=one)
            config.update(num_kv_heads=config.get("num_key_value_heads"), num_ln_in_parallel_attn=2 if two else 1)
            config["ffn_hidden_size"] = _inner_size(model)
        case "mpt":
            attention = {
                "clip_qkv": config.get("clip_qkv"),
                "alibi_bias_max": _number(model, "attention.max_alibi_bias"),
            }
            config["attn_config"] = {key: value for key, value in attention.items() if value}
        case "gpt2":
            config["n_inner"] = _inner_size(model)
        case "starcoder":
            config.update(n_inner=_inner_size(model), multi_query=config.get("num_key_value_heads") == 1)
        case "phimoe":
            config["lm_head_bias"] = has("output.bias")
        case "deepseek2":
            _add_latent(model, config)
        case "qwen35" | "qwen35moe" | "qwen3next":
            _add_delta(model, config)


def _inner_size(model: GgufModel) -> int | None:
    """Return the width of MLPs by their tensor, where files state four times the model's width whatever it is."""
    down = model.tensors.get("blk.0.ffn_down.weight")
    return None if down is None else down.shape[-1]


def _add_delta(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the widths of the gated delta rule's heads. Raises CheckpointError where they cannot be told."""
    keys, values = (config.get(f"linear_num_{kind}_heads") or 0 for kind in ("key", "value"))
    if any(type(count) is not int or not 0 < count <= 1 << 16 for count in (keys, values)) or values % keys:
        raise CheckpointError(
            f"{model.file}: '{model.architecture}.ssm.time_step_rank' must be a multiple of "
            f"'{model.architecture}.ssm.group_count', and both positive, not {values!r:.20} and {keys!r:.20}."
        )
    sizes = {"linear_value_head_dim": model.own("ssm.inner_size", int, 0) // values, "linear_key_head_dim": 0}
    config.update({name: config.get(name) or size for name, size in sizes.items()})
    if any(config[name] < 1 for name in sizes):
        raise CheckpointError(f"{model.file}: the sizes 'ssm.inner_size' and 'ssm.state_size' must be positive.")


def _add_latent(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of DeepSeek's latent attention.

    The widths of whole heads are under other keys where keys are stored absorbed.
    """
    if model.own("expert_gating_func", int) == _SIGMOID:
        config["architectures"] = ["DeepseekV3ForCausalLM"]
    key = model.own("attention.key_length_mla", int) or model.own("attention.key_length", int, 0)
    config["qk_nope_head_dim"] = key - config.get("qk_rope_head_dim", 0)
    config["v_head_dim"] = model.own("attention.value_length_mla", int) or model.own("attention.value_length", int, 0)
    config["num_key_value_heads"] = config.get("num_attention_heads")
    config.setdefault("q_lora_rank", None)
    config.pop("head_dim", None)


def _add_rotation(model: GgufModel, config: dict[str, Any]) -> None:
    config["rope_theta"] = float(model.own("rope.freq_base", float, 10000.0))
    turned = model.own("rope.dimension_count", int)
    heads = config.get("num_attention_heads") or 1
    width = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if turned and width and "kv_lora_rank" not in config:
        config["partial_rotary_factor"] = turned / width
    scaling = _scaling(model, config)
    if scaling:
        config["rope_scaling"] = scaling


def _scaling(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    kind, factor = model.own("rope.scaling.type", str, "none"), model.own("rope.scaling.factor", float)
    length = model.own("rope.scaling.original_context_length", int)
    short, long = (_divisors(model, f"rope_factors_{which}.weight") for which in ("short", "long"))
    if short and long:
        config["original_max_position_embeddings"] = length
        stretched = model.own("rope.scaling.attn_factor", float)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": stretched}
    every = _divisors(model, "rope_freqs.weight")
    if every and any(divisor != 1 for divisor in every):  # Llama 3's, which are the same at every length
        both = {"short_factor": every, "long_factor": every}
        limit = config.get("max_position_embeddings")
        return {"rope_type": "longrope", **both, "attention_factor": 1.0, "original_max_position_embeddings": limit}
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or not factor:
        return {}
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    found |= {name: model.own(f"rope.scaling.{key}", float) for name, key in names.items()}
    sharpening = model.own("rope.scaling.yarn_log_multiplier", float)
    if sharpening:  # a tenth of DeepSeek's `mscale_all_dim`
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), sharpening * 10)
    growth = model.own("attention.temperature_scale", float)
    if growth:
        found["llama_4_scaling_beta"] = growth
    if model.architecture == "gpt-oss":
        found["truncate"] = False
    return {name: value for name, value in found.items() if value is not None}


def _divisors(model: GgufModel, name: str) -> list[float]:
    """Return the numbers of a small float tensor; none where it is absent. Raises CheckpointError for another type."""
    info = model.tensors.get(name)
    if info is None:
        return []
    if info.type.name != "F32" or info.num_bytes > 1 << 16:
        raise CheckpointError(f"{model.file}: the tensor {name!r} is not a row of F32.")
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        return list(memoryview(stream.read(info.num_bytes)).cast("f"))


def is_quantized(model: GgufModel) -> bool:
    return any(info.type.name not in FLOATS for info in model.tensors.values())
