"""Tiny checkpoints of transformers as GGUF files, by the rules of llama.cpp's converter.

The names of tensors are those of the `gguf` package's own map; what the converter does to numbers is said here anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

from ferrule_testkit import checkpoints
from ferrule_testkit.checkpoints import SIZES, Recipe, randomise, write_tokenizer

Tensors = Mapping[str, torch.Tensor]
Pieces = Iterator[tuple[str, torch.Tensor]]
Change = Callable[[Any, str, torch.Tensor], Pieces]
_ARCHITECTURES = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}


@dataclass(frozen=True)
class Case:
    """One architecture: the recipe's configuration, what the converter does to tensors, and keys of its own."""

    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attention: str = "eager"


def paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put neighbouring features in the place of halves of a head."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    if "q_proj" in name:
        tensor = paired(tensor, config.num_attention_heads)
    elif "k_proj" in name:
        tensor = paired(tensor, config.num_key_value_heads)
    yield name, tensor


def one_more(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def gpt2(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    yield name, tensor.t() if turned else tensor


def by_heads(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    """Separate queries, keys and values, which BLOOM and GPT-NeoX have by heads."""
    name = name.removeprefix("transformer.")
    if "query_key_value" in name:
        heads = getattr(config, "n_head", None) or config.num_attention_heads
        tensor = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    yield name, tensor


def falcon(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    if "query_key_value" in name:
        heads = config.num_attention_heads
        groups = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        cells = tensor.view(groups, heads // groups + 2, -1, *tensor.shape[1:])
        parts = cells[:, :-2], cells[:, [-2]], cells[:, [-1]]
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    yield name, tensor


def stablelm(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    """Yield tensors as they are; norms of single heads are stacked by `_convert`."""
    yield name, tensor


def stacked_moe(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    """Separate experts, gates and ups, which transformers 5 stacks."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        base = name.removesuffix("gate_up_proj")
        yield f"{base}gate_proj.weight", gate
        yield f"{base}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        place = (
            "block_sparse_moe." if ".mlp.e_score" in name else "mlp.moe_statics." if "statics" in name else "mlp.gate."
        )
        yield f"{name.partition('mlp.')[0]}{place}e_score_correction.bias", tensor.flatten()
    else:
        yield name, tensor


def sparse_llama(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    for own, each in stacked_moe(config, name, tensor):
        yield from llama(config, own, each)


def granitemoe(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    name = name.replace("router.weight", "router.layer.weight").replace("block_sparse_moe.experts", "mlp.experts")
    yield from sparse_llama(config, name, tensor)


def gpt_oss(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    if "experts.gate_up_proj" in name:
        suffix = "bias" if name.endswith("_bias") else "weight"
        base = name.partition("gate_up_proj")[0]
        parts = [tensor[..., n::2] for n in (0, 1)]
        for own, part in zip(("gate_proj", "up_proj"), parts, strict=True):
            yield f"{base}{own}.{suffix}", part if suffix == "bias" else part.transpose(1, 2)
    elif "experts.down_proj" in name:
        suffix = "bias" if name.endswith("_bias") else "weight"
        base = name.partition("down_proj")[0]
        yield f"{base}down_proj.{suffix}", tensor if suffix == "bias" else tensor.transpose(1, 2)
    elif name.endswith("sinks"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def deepseek(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    if "kv_b_proj" in name:
        cells = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = cells.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield from stacked_moe(config, name, tensor)


def mamba(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    yield name, tensor


def mamba2(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    for own, each in mamba(config, name, tensor):
        if own.endswith(("A_log", ".D")):
            each = each.unsqueeze(-1)
        if own.endswith("mixer.norm.weight"):
            each = each.view(config.n_groups, -1)
        yield own.replace("dt_bias", "dt.bias"), each


def delta(config: Any, name: str, tensor: torch.Tensor) -> Pieces:
    """Convert the gated delta rule: separate Qwen3-Next's projections, and put Qwen 3.5's value heads in tiles."""
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    width, first = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim

    def tiled(rows: torch.Tensor, size: int) -> torch.Tensor:
        return rows.view(keys, each, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("in_proj_qkvz.weight"):
        sizes = [config.linear_key_head_dim] * 2 + [each * width] * 2
        *qkv, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(sizes, 1))
        yield name.replace("qkvz", "qkv"), torch.cat(qkv)
        yield name.replace("qkvz", "z"), z
        return
    if "linear_attn" in name and config.model_type != "qwen3_next":
        if "in_proj_qkv" in name or "conv1d" in name:
            tensor = torch.cat((tensor[:first], tiled(tensor[first:], width)))
        elif "in_proj_z" in name:
            tensor = tiled(tensor, width)
        elif "out_proj" in name:
            tensor = tiled(tensor.t(), width).t()
        elif "norm" not in name:
            tensor = tiled(tensor, 1)
    for own, part in stacked_moe(config, name, tensor):
        yield from mamba(config, own.replace("dt_bias", "dt_proj.bias"), part)


def recipe(case: Case) -> Recipe:
    return Recipe(case.kind, case.changes, case.seed, case.attention)


def write_checkpoint(case: Case, folder: Path) -> Any:
    """Write the checkpoint as transformers has it; return its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in {**SIZES, **case.changes}.items() if value is not ...}
    config = AutoConfig.for_model(case.kind, **values)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=case.attention)
    randomise(model, case.seed, checkpoints.Recipe(case.kind).gain)
    folder.mkdir(parents=True, exist_ok=True)
    model.float().eval().save_pretrained(folder)
    write_tokenizer(folder)
    return model.config, model.state_dict()


def write_file(name: str, case: Case, config: Any, state: Tensors, file: Path) -> None:
    """Write the same model as a GGUF file of F32."""
    writer = GGUFWriter(str(file), name)
    add_numbers(writer, config)
    for key, value in case.keys.items():
        add_key(writer, f"{name}.{key}", value)
    layers = getattr(config, "num_hidden_layers", None) or config.n_layer
    names = get_tensor_name_map(_ARCHITECTURES[name], layers)
    change = case.change or stacked_moe
    tied = getattr(config, "tie_word_embeddings", False)
    for own, tensor in stacked_norms(state).items():
        if own.startswith(("lm_head", "embed_out")) and own.endswith("weight") and tied:
            continue
        for piece, part in change(config, own, tensor):
            found = names.get_name(piece, (".weight", ".bias"))
            if found is None:
                raise KeyError(f"{own}: {piece} has no name in {name}")
            writer.add_tensor(found, part.float().contiguous().numpy())
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config.head_dim).numpy())
    if rope.get("rope_type") == "longrope":
        length, limit = config.original_max_position_embeddings, config.max_position_embeddings
        stretched = math.sqrt(1 + math.log(limit / length) / math.log(length))
        add_key(writer, f"{name}.rope.scaling.original_context_length", length)
        add_key(writer, f"{name}.rope.scaling.attn_factor", stretched)
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", torch.tensor(rope[f"{which}_factor"]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked_norms(state: Tensors) -> dict[str, torch.Tensor]:
    """Stack StableLM's norms of single heads in one tensor."""
    found: dict[str, torch.Tensor] = {}
    heads: dict[str, list[torch.Tensor]] = {}
    for name, tensor in state.items():
        if "_layernorm.norms." in name:
            heads.setdefault(name.partition(".norms.")[0] + ".weight", []).append(tensor)
        else:
            found[name] = tensor
    return {**found, **{name: torch.stack(parts) for name, parts in heads.items()}}


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
}


def add_numbers(writer: GGUFWriter, config: Any) -> None:
    """Add what the converter states of every model, where its configuration has it."""
    arch = writer.arch
    for key, names in _NUMBERS.items():
        value = next((each for name in names if (each := getattr(config, name, None)) is not None), None)
        value = value[0] if isinstance(value, list) else value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            add_key(writer, f"{arch}.{key}", value)
    if getattr(config, "n_head", None) and not getattr(config, "num_key_value_heads", None):
        heads = getattr(config, "num_kv_heads", None) or config.n_head
        add_key(writer, f"{arch}.attention.head_count_kv", heads)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta"):
        add_key(writer, f"{arch}.rope.freq_base", float(rope["rope_theta"]))
        heads = getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        add_key(writer, f"{arch}.rope.dimension_count", int(width * rope.get("partial_rotary_factor", 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        add_key(writer, f"{arch}.rope.scaling.type", kind)
        add_key(writer, f"{arch}.rope.scaling.factor", float(rope["factor"]))
    if kind == "yarn":
        add_key(writer, f"{arch}.rope.scaling.original_context_length", rope["original_max_position_embeddings"])


def llama3_divisors(rope: Mapping[str, Any], width: int) -> torch.Tensor:
    """Return the tensor `rope_freqs` of Llama 3's rotation."""
    found = []
    for index in range(0, width, 2):
        frequency = rope["rope_theta"] ** -(index / width)
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - blend) / rope["factor"] + blend))
    return torch.tensor(found)
