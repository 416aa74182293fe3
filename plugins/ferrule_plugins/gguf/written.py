"""What a GGUF file says of a model, from its ``config.json``: the reverse of `ferrule_plugins.gguf.architectures`.

Whatever is stated is read back, and compared with the configuration: what a file cannot say is refused, not lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ferrule.checkpoint import Values, architectures, positive
from ferrule.errors import CheckpointError
from ferrule_nn.rope import RopeConfig
from ferrule_plugins.gguf.architectures import ARCHITECTURES, KEYS, read_config
from ferrule_plugins.gguf.names import Names, Target
from ferrule_plugins.gguf.reader import TYPES, GgufModel, TensorInfo

# Architectures whose checkpoints have our names behind "model.", and the activation that such a file implies.
ACTIVATIONS: Mapping[str, str] = {
    "arcee": "relu2",
    "gemma": "gelu_pytorch_tanh",
    "gemma2": "gelu_pytorch_tanh",
    "granite": "silu",
    "llama": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "qwen3moe": "silu",
}
_SAME = {"MistralForCausalLM": "llama"}  # models that differ from another in nothing but their name
_ACTIVATION = ("hidden_activation", "hidden_act")  # the first one counts
_ALTERNATE = ("gemma2",)  # every second layer has a window, which no key states
_FLOATS = ("epsilon", "scale", "softcapping", "freq_base", "factor", "clamp_kqv")  # what keys of floats end in
# Not the model's: what a checkpoint says of itself, and what is compared by its tensors.
_APART = frozenset(("architectures", "model_type", "dtype", "rope_parameters", "bos_token_id", "eos_token_id", "bias"))
_LARGEST, _F32_MOST = 2**32 - 1, torch.finfo(torch.float32).max  # of 32 bits
_TOLERANCE = 1e-6  # of a float that is stored with 32 bits
_F32 = TYPES[0]
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_FILE = Path("model.gguf")  # that is to be written


@dataclass(frozen=True)
class Written:
    """One model as a file has it: metadata, the tensors' names with what they are made of, and divisors of rotation."""

    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[Target, ...]]
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)


def describe(config: Values, shapes: Mapping[str, tuple[int, ...]]) -> Written:
    """`shapes` are those of the checkpoint's tensors. Raises CheckpointError for what a file cannot say."""
    name = _architecture(config)
    for key in _SIZES:
        if positive(config, key) is None:
            raise CheckpointError(f"{config.file} has no {key!r}.")
    own = {_ours(tensor): shape for tensor, shape in shapes.items() if not tensor.endswith("rotary_emb.inv_freq")}
    if config.get("tie_word_embeddings"):
        own.pop("lm_head.weight", None)
    names = Names(ARCHITECTURES[name], config)
    tensors = names.sources(own)
    left = own.keys() - {target.name for targets in tensors.values() for target in targets}
    if left:
        raise CheckpointError(f"The tensor {min(left)!r} has no name in GGUF files of the architecture {name!r}.")
    for target in (target for targets in tensors.values() for target in targets if target.heads):
        if own[target.name][0] % (2 * target.heads):
            raise CheckpointError(
                f"The rows of {target.name!r} are not a whole number for each of {target.heads} heads."
            )
    layers = config["num_hidden_layers"]
    if not any(tensor.startswith(f"blk.{layers - 1}.") for tensor in tensors):
        raise CheckpointError(f"{config.file}: 'num_hidden_layers' is {layers}, but there are fewer.")
    keys, added = _keys(name, config), {}
    rope = RopeConfig.of(config, keys["attention.key_length"])
    keys |= {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    match rope.kind:
        case "default":
            pass
        case "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": _number(rope, "factor")}
        case "llama3":
            added["rope_freqs.weight"] = _llama3_divisors(rope)
        case _:
            raise CheckpointError(f"Rotary scaling of the kind {rope.kind!r} is not written to GGUF files.")
    metadata: dict[str, Any] = {"general.architecture": name}
    for key, value in keys.items():
        if not value <= _F32_MOST:
            raise CheckpointError(
                f"{config.file}: {value!r:.40} is no number of 32 bits, as a GGUF file has for {key}."
            )
        metadata[f"{name}.{key}"] = float(value) if key.endswith(_FLOATS) else value
    _compare(config, read_config(_model(metadata, tensors, own)))
    return Written(name, metadata, tensors, added)


def joined(targets: tuple[Target, ...], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of a file, of the checkpoint's own by our names."""
    parts = []
    for target in targets:
        part = tensors[target.name]
        if target.heads:
            part = part.view(target.heads, 2, -1, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
        parts.append(part.float() + 1 if target.change == "less_one" else part)
    return torch.stack(parts) if targets[0].expert >= 0 else parts[0]


def by_our_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {_ours(name): tensor for name, tensor in tensors.items()}


def _ours(name: str) -> str:
    return name.removeprefix("model.")


def _architecture(config: Values) -> str:
    model = architectures(config)[0]
    found = _SAME.get(model) or next((name for name in ACTIVATIONS if ARCHITECTURES[name].model == model), None)
    if found is None:
        known = ", ".join([*(ARCHITECTURES[name].model for name in ACTIVATIONS), *_SAME])
        raise CheckpointError(f"{model} is not written to GGUF files.", f"Those that are: {known}.")
    return found


def _keys(name: str, config: Values) -> dict[str, Any]:
    """Without the architecture's name in front. Raises CheckpointError for what no key can state."""
    activation = next((config[key] for key in _ACTIVATION if config.get(key)), ACTIVATIONS[name])
    if activation != ACTIVATIONS[name]:
        raise CheckpointError(f"{config.file}: GGUF files of {name!r} cannot state the activation {activation!r}.")
    kinds, window = config.get("layer_types") or [], config.get("sliding_window")
    if not isinstance(kinds, list):
        raise CheckpointError(f"{config.file}: 'layer_types' is not a list.")
    if window and name not in _ALTERNATE and config.get("use_sliding_window") is not False:
        kinds = ["sliding_attention"]  # which llama.cpp would not compute
    usual = ("sliding_attention", "full_attention") if name in _ALTERNATE else ("full_attention",) * 2
    if any(kind != usual[index % 2] for index, kind in enumerate(kinds)) or config.get("mlp_only_layers"):
        raise CheckpointError(f"{config.file}: GGUF files of {name!r} cannot state which layers are of which kind.")
    heads = config["num_attention_heads"]
    stated = {
        **config,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
    }
    if config.get("use_sliding_window") is False:
        del stated["sliding_window"]
    found = {}
    for own, key in {**KEYS, **ARCHITECTURES[name].config}.items():
        value = stated.get(own)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            raise CheckpointError(f"{config.file}: {own!r} is {value!r:.40}, which no key of a GGUF file can state.")
        found[key] = value
    return {**found, "attention.value_length": stated["head_dim"]}


def _number(rope: RopeConfig, key: str) -> float:
    value = rope.options.get(key)
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(f"Rotary scaling of the kind {rope.kind!r} needs a positive {key!r}, not {value!r:.40}.")
    return float(value)


def _llama3_divisors(rope: RopeConfig) -> torch.Tensor:
    """What the angles of each pair of features are divided by, float32 [dim / 2]."""
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    frequencies = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    turns = rope.original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / _number(rope, "factor") + blend)).float()


def _model(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Target, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> GgufModel:
    """The file before it is written; of its tensors, only names and shapes are true."""
    found = {}
    for name, targets in tensors.items():
        shape = shapes.get(targets[0].name, ())
        stacked = (len(targets), *shape) if targets[0].expert >= 0 else shape
        found[name] = TensorInfo(name, stacked, _F32, _FILE, 0)
    return GgufModel((_FILE,), metadata, found)


def _compare(config: Values, read: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a value that readers of the file would not take as the checkpoint's."""
    for key, value in read.items():
        stated = config.get(key)
        if key in _APART or stated is None or (key == "sliding_window" and config.get("use_sliding_window") is False):
            continue
        same = math.isclose(stated, value, rel_tol=_TOLERANCE) if isinstance(value, float) else stated == value
        if not same:
            raise CheckpointError(f"{config.file}: readers of a GGUF file would take {key!r} as {value}, not {stated}.")
