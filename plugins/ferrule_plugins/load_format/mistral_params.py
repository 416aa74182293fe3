"""``params.json``, the form in which Mistral AI writes a model's configuration, in the terms of a ``config.json``.

https://github.com/mistralai/mistral-inference/blob/main/src/mistral_inference/args.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError

NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
_NEEDED = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
_UNREAD = {  # key → what it says about the model
    "kv_lora_rank": "has latent attention",
    "multimodal": "hears or transcribes",
    "ssm_cfg": "is not a transformer",
}
_LENGTH = 128_000  # of a file that does not state one, as in vLLM


def translated(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the keys of ``config.json``, and beside them those of `NAMES` as they are. Raises CheckpointError naming a
    key.
    """
    for key, what in _UNREAD.items():
        if params.get(key):
            raise _unread(file, key, what)
    if params.get("model_type") not in (None, "transformer"):
        raise _unread(file, "model_type", f"is of the type {params['model_type']!r:.40}")
    for key in _NEEDED:
        if params.get(key) is None:
            raise CheckpointError(f"{file} has no {key!r}, which every model needs.", "The folder may be incomplete.")
    found = {own: params[own] for own in NAMES if params.get(own) is not None}
    found |= {common: found[own] for own, common in NAMES.items() if own in found}
    found |= {key: params[key] for key in ("head_dim", "vocab_size") if params.get(key) is not None}
    length = params.get("max_seq_len") or params.get("max_position_embeddings") or _LENGTH
    return {
        "num_key_value_heads": params["n_heads"],
        "rms_norm_eps": 1e-5,
        "rope_theta": params.get("rope_theta", 10000.0),
        "max_position_embeddings": length,
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
        "dtype": "bfloat16",
        **found,
        **_windows(params, file),
        **_yarn(params, file),
        **_experts(params, file),
        **_quantization(params, file),
    }


def _unread(file: Path, key: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: by its {key!r} this model {what}, which is not read from Mistral's form.",
        "Take the checkpoint in the form of transformers, with a config.json.",
    )


def _section(params: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    section = params.get(key) or {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{file}: {key!r} must be an object, not {section!r:.80}.")
    return section


def _windows(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Translate one window for all layers, or a pattern of windows and nulls that repeats."""
    window = params.get("sliding_window")
    if not isinstance(window, list):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    stated = [width for width in window if width is not None]
    if any(width != stated[0] for width in stated[1:]) or not stated:
        raise CheckpointError(f"{file}: 'sliding_window' {window!r:.80} has several widths, which is not implemented.")
    kinds = ["full_attention" if width is None else "sliding_attention" for width in window]
    layers = params["n_layers"] if isinstance(params["n_layers"], int) else 0  # anything else is refused later
    return {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": stated[0],
        "layer_types": [kinds[layer % len(kinds)] for layer in range(min(layers, 1 << 12))],
    }


def _yarn(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Translate YaRN, and queries that grow with their position."""
    yarn, growth = _section(params, "yarn", file), _section(params, "llama_4_scaling", file)
    if not yarn:
        if growth:
            raise CheckpointError(f"{file}: 'llama_4_scaling' without 'yarn' is not implemented.")
        return {}
    rope = {
        "rope_type": "yarn",
        "factor": yarn.get("factor"),
        "original_max_position_embeddings": yarn.get("original_max_position_embeddings"),
        "beta_fast": yarn.get("beta", 32.0),
        "beta_slow": yarn.get("alpha", 1.0),
    }
    if None in rope.values():
        raise CheckpointError(f"{file}: 'yarn' needs 'factor' and 'original_max_position_embeddings'.")
    if yarn.get("apply_scale") is False:
        rope["attention_factor"] = 1.0
    if not growth:
        return {"rope_parameters": rope}
    if growth.get("original_max_position_embeddings") != rope["original_max_position_embeddings"]:
        raise CheckpointError(f"{file}: 'llama_4_scaling' and 'yarn' begin at different lengths: not implemented.")
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {**rope, "llama_4_scaling_beta": growth.get("beta")},
    }


def _experts(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    experts = _section(params, "moe", file)
    if not experts:
        return {}
    others = experts.keys() - {"num_experts", "num_experts_per_tok"}
    if others:
        raise _unread(file, "moe", f"has experts with {min(others)!r}")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts.get("num_experts"),
        "num_experts_per_tok": experts.get("num_experts_per_tok"),
    }


def _quantization(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    section = _section(params, "quantization", file)
    if not section:
        return {}
    if section.get("qformat_weight") != "fp8_e4m3":
        raise _unread(file, "quantization", f"has weights in {section.get('qformat_weight')!r:.40}")
    scheme = "dynamic" if section.get("qscheme_act") == "NO_SCALES" else "static"
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme}}
