"""The description of a model in a GGUF file, made from a ``config.json``: the reverse of
`ferrule_files.gguf.architectures`.

The description is read back, and the model that readers would build is compared with the checkpoint's own: a model that
a file cannot describe is refused, so that nothing is lost.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from ferrule.checkpoint import Values, architectures, completed, positive, read
from ferrule.errors import CheckpointError
from ferrule.interfaces.model import Model
from ferrule_files.gguf.architectures import ARCHITECTURES, KEYS, read_config
from ferrule_files.gguf.names import Names, Target
from ferrule_files.gguf.reader import TYPES, GgufModel, TensorInfo
from ferrule_nn import Decoder
from ferrule_nn.decoder import DecoderSpec
from ferrule_nn.rope import RopeConfig
from ferrule_quantize.gguf import forms
from ferrule_quantize.gguf.differences import differences
from ferrule_quantize.gguf.forms import FORMS, SAME, Form

_EPSILONS = {"rms": "rms_norm_eps", "layer": "layer_norm_eps"}
_FLOATS = ("epsilon", "scale", "softcapping", "factor", "clamp_kqv", "alibi_bias", "freq_base", "freq_base_swa")
_LARGEST, _F32_MOST = 2**32 - 1, torch.finfo(torch.float32).max  # of 32 bits
_F32 = TYPES[0]
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_FILE = Path("model.gguf")  # that is to be written
_LONG = ("phi3",)  # whose readers take factors for each pair of features
Build = Callable[[Mapping[str, Any]], Model]


@dataclass(frozen=True)
class Written:
    """One model as a file has it: metadata, the tensors' names with what they are made of, and divisors of rotation.

    `own` are the checkpoint's tensors under our names.
    """

    name: str
    spec: DecoderSpec
    own: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[Target, ...]]
    added: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def joined(self, name: str) -> torch.Tensor:
        """Return a tensor of the file, joined from the checkpoint's."""
        targets = self.tensors[name]
        parts = [self._part(target) for target in targets]
        return torch.stack(parts) if targets[0].expert >= 0 else parts[0]

    def _part(self, target: Target) -> torch.Tensor:
        part, spec = self.own[target.name], self.spec
        if target.heads:
            return part.reshape(target.heads, 2, -1, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
        match target.change:
            case "less_one":
                return part.float() + 1
            case "by_group":
                groups = part.reshape(spec.num_kv_heads, spec.num_heads // spec.num_kv_heads + 2, -1, *part.shape[1:])
                return torch.cat([each.flatten(0, 2) for each in (groups[:, :-2], groups[:, [-2]], groups[:, [-1]])])
        return part


def describe(config: Values, tensors: Mapping[str, torch.Tensor], build: Build) -> Written:
    """Describe the checkpoint with these `tensors`; `build` makes a model of a configuration, on the meta device.

    Raises CheckpointError for what a file cannot say.
    """
    name, form = _architecture(config)
    for key in _SIZES[:2]:
        if key in config and positive(config, key) is None:
            raise CheckpointError(f"{config.file} has no {key!r}.")
    model = build(config)
    if not isinstance(model, Decoder):
        raise CheckpointError(f"{type(model).__name__} is not a model that can be written to GGUF files.")
    config = _settled(config, model)
    own = forms.by_our_names(tensors, model.naming, form)
    if model.spec.tied:
        own.pop("lm_head.weight", None)
    sources = Names(ARCHITECTURES[name], config).sources(own, model.naming.rename, form.by_group)
    _check_names(name, model.spec, own, sources)
    keys = _keys(name, form, config, model.spec)
    added = {} if model.rope is None else _add_rotation(name, keys, model)
    metadata: dict[str, Any] = {"general.architecture": name}
    for key, value in keys.items():
        if not isinstance(value, str) and not value <= _F32_MOST:
            raise CheckpointError(
                f"{config.file}: {value!r:.40} is no number of 32 bits, as a GGUF file has for {key}."
            )
        metadata[f"{name}.{key}"] = float(value) if key.endswith(_FLOATS) and not isinstance(value, bool) else value
    again = build(_read_back(_model(metadata, sources, own)))
    for what, taken, stated in differences(again, model, rotation=not added):
        raise CheckpointError(f"{config.file}: readers of a GGUF file would take {what!r} as {taken}, not {stated}.")
    return Written(name, model.spec, own, metadata, sources, added)


def _settled(config: Values, model: Decoder) -> Values:
    """Return the configuration completed with the names and defaults of the architecture."""
    found: Any = completed(config, {"num_local_experts": "num_experts", **model.config_names}, model.config_defaults)
    if found.get("new_decoder_architecture") and found.get("num_ln_in_parallel_attn") is None:  # Falcon's
        found["num_ln_in_parallel_attn"] = 2
    return cast(Values, found)


def _architecture(config: Values) -> tuple[str, Form]:
    model = architectures(config)[0]
    by_model = {own: name for name in FORMS for own in (ARCHITECTURES[name].model, ARCHITECTURES[name].sparse) if own}
    found = SAME.get(model) or by_model.get(model)
    if found is None:
        known = ", ".join([*by_model, *SAME])
        raise CheckpointError(f"{model} is not written to GGUF files.", f"Those that are: {known}.")
    return found, FORMS[found]


def _check_names(
    name: str, spec: DecoderSpec, own: Mapping[str, torch.Tensor], sources: Mapping[str, tuple[Target, ...]]
) -> None:
    """Raise CheckpointError for tensors without a name, for missing layers, and for heads that are cut apart."""
    left = own.keys() - {target.name for targets in sources.values() for target in targets}
    if left:
        raise CheckpointError(f"The tensor {min(left)!r} has no name in GGUF files of the architecture {name!r}.")
    if not any(tensor.startswith(f"blk.{spec.num_layers - 1}.") for tensor in sources):
        raise CheckpointError(f"'num_hidden_layers' is {spec.num_layers}, but there are fewer.")
    merged = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    for target in (target for targets in sources.values() for target in targets):
        rows = own[target.name].shape[0]
        if rows % (2 * target.heads or 1) or (target.change == "by_group" and rows != merged):
            raise CheckpointError(f"The rows of {target.name!r} are not a whole number for each of the heads.")


def _keys(name: str, form: Form, config: Values, spec: DecoderSpec) -> dict[str, Any]:
    """Return the keys without the architecture's name in front. Raises CheckpointError for what no key can state."""
    limit = int(config.get("max_position_embeddings") or 0)
    window = max(spec.windows, default=0)
    if window >= limit:
        window = 0
    if tuple(each if window else 0 for each in spec.windows) != form.windows(window, spec.num_layers):
        raise CheckpointError(f"{config.file}: GGUF files of {name!r} cannot state which layers are of which kind.")
    stated = {
        **{key: value for key, value in config.items() if key not in _EPSILONS.values()},
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.inner_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        _EPSILONS[spec.norm]: spec.norm_eps,
        "clip_qkv": spec.qkv_clip or None,
        "sliding_window": window or None,
    }
    found: dict[str, Any] = {"vocab_size": spec.vocab_size}
    for own, key in {**KEYS, **ARCHITECTURES[name].config}.items():
        value = stated.get(own)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            raise CheckpointError(f"{config.file}: {own!r} is {value!r:.40}, which no key of a GGUF file can state.")
        found[key] = value
    if name == "mpt":
        found["attention.max_alibi_bias"] = (config.get("attn_config") or {}).get("alibi_bias_max") or 8.0
    return {**found, "attention.value_length": spec.head_dim}


# ------------------------------------------------------------------------------------------------ rotation


def _add_rotation(name: str, keys: dict[str, Any], model: Decoder) -> dict[str, torch.Tensor]:
    """Add the keys of the rotation, and return the tensors that it needs.

    Raises CheckpointError for kinds that no file states.
    """
    if model.rope is None:
        return {}
    rope = model.rope.config
    keys |= {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    if model.local_rope is not None:
        keys["rope.freq_base_swa"] = model.local_rope.config.theta
    match rope.kind:
        case "default":
            return {}
        case "linear" | "yarn":
            keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": _number(rope, "factor")}
            if rope.kind == "yarn":
                keys["rope.scaling.original_context_length"] = rope.original
            return {}
        case "llama3":
            return {"rope_freqs.weight": _llama3_divisors(rope)}
        case "longrope" if name in _LONG:
            stretch = model.rope.factor
            keys |= {"rope.scaling.original_context_length": rope.original, "rope.scaling.attn_factor": stretch}
            return {f"rope_factors_{which}.weight": _factors(rope, f"{which}_factor") for which in ("long", "short")}
    raise CheckpointError(f"Rotary scaling of the kind {rope.kind!r} is not written to GGUF files of {name!r}.")


def _number(rope: RopeConfig, key: str) -> float:
    value = rope.options.get(key)
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(f"Rotary scaling of the kind {rope.kind!r} needs a positive {key!r}, not {value!r:.40}.")
    return float(value)


def _factors(rope: RopeConfig, key: str) -> torch.Tensor:
    return torch.tensor(rope.need(key), dtype=torch.float32)


def _llama3_divisors(rope: RopeConfig) -> torch.Tensor:
    """Return the divisors of the angles of each pair of features, float32 [dim / 2]."""
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    frequencies = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    turns = rope.original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / _number(rope, "factor") + blend)).float()


# ------------------------------------------------------------------------------------------------ what readers take


def _model(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Target, ...]], own: Mapping[str, torch.Tensor]
) -> GgufModel:
    """Return the file as a model before it is written; of its tensors, only names and shapes are true."""
    found = {}
    for name, targets in tensors.items():
        shape = tuple(own[targets[0].name].shape)
        stacked = (len(targets), *shape) if targets[0].expert >= 0 else shape
        found[name] = TensorInfo(name, stacked, _F32, _FILE, 0)
    return GgufModel((_FILE,), metadata, found)


def _read_back(model: GgufModel) -> Values:
    """Return the configuration that readers find in the file."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_bytes(msgspec.json.encode(read_config(model)))
        return read(place)
