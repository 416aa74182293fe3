"""The parameters that the tensors of a GGUF file become. File names are the same for all architectures, as ours are.

Only rows are moved, never numbers within one, so quantized tensors are moved as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError
from ferrule_files.gguf.architectures import NEXT_LAYERS, Architecture
from ferrule_files.gguf.reader import TYPES, TensorInfo

_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_OUTER = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embed_norm",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_DELTA = {
    **dict.fromkeys(("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_norm", "ssm_out", "ssm_ba"), ""),
    "ssm_beta": "in_proj_b.weight",
    "ssm_alpha": "in_proj_a.weight",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
}
_WHOLE = {"attn_sinks": "self_attn.sinks", "exp_probs_b": "mlp.gate.e_score_correction_bias", "ssm_d": "mixer.D"}
_MERGED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}  # where a checkpoint has one tensor too
_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_SUFFIXES = ("weight", "bias")
_IGNORED = re.compile(r"rope_freqs|rope_factors_(long|short)|blk\.\d+\.(attn_rot_embd|nextn\..+)")


@dataclass(frozen=True)
class Target:
    """A parameter, and the rows of a file's tensor that belong to it. With `heads`, features of a head come in pairs.

    `expert` is the index in a stack of experts. `rows` and `columns` list which ones the parameter has, in its order;
    where they are empty, all stay as they are. `change` is what else is done to a tensor of floats: less_one, log (of
    the negated values), conv, flat; keys and values are halves of one of our matrices. by_group is for files that are
    written: queries, keys and values come for each key head in turn.
    """

    name: str
    start: int = 0
    stop: int = 0
    heads: int = 0
    expert: int = -1
    change: str = ""
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def block(self, size: int) -> int:
        """Return how many of `size` columns stay together in their order: all, or a divisor."""
        order = self.columns
        breaks = (at for at in range(1, len(order)) if order[at] != order[at - 1] + 1)
        return gcd(size, *order[:1], *(each for at in breaks for each in (at, order[at])))


@dataclass(frozen=True)
class ValueHeads:
    """The value heads of the gated delta rule. Our models keep the value heads of one key head together.

    Files that are `tiled` have the first value head of each key head, then the second of each; `first` is the row at
    which values begin, behind queries and keys.
    """

    groups: int
    each: int
    width: int
    first: int
    tiled: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], tiled: bool) -> ValueHeads:
        groups, heads = (int(config[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
        first = 2 * groups * int(config["linear_key_head_dim"])
        return cls(groups, heads // groups, int(config["linear_value_head_dim"]), first, tiled)

    def check(self, info: TensorInfo, name: str) -> None:
        """Raise CheckpointError for a tensor of another size, before any order is made of it."""
        heads = self.groups * self.each
        values = heads * self.width
        sizes = {"attn_qkv": self.first + values, "ssm_conv1d": self.first + values, "attn_gate": values}
        sizes |= {"ssm_out": values, "ssm_ba": 2 * heads, "ssm_norm": self.width}
        found = info.shape[0] if name != "ssm_out" else info.shape[1] if len(info.shape) == 2 else 0
        if found != sizes.get(name, heads):
            raise CheckpointError(
                f"{info.file}: the tensor {info.name!r} has {found} rows or columns, "
                f"by the numbers of heads {sizes.get(name, heads)}."
            )

    def order(self, first: int = 0, width: int = 0) -> tuple[int, ...]:
        """Return the file's row for each of ours, for heads of `width` rows behind `first` other rows.

        An empty result means that the order is the same.
        """
        if not self.tiled or self.each == 1:
            return ()
        width = width or self.width
        heads = (tile * self.groups + group for group in range(self.groups) for tile in range(self.each))
        rows = (first + head * width + row for head in heads for row in range(width))
        return (*range(first), *rows)

    def half(self, index: int) -> tuple[int, ...]:
        """Return the rows of one of two numbers of each value head; a key head has all of one, then all of the
        other.
        """
        starts = (group * 2 * self.each + index * self.each for group in range(self.groups))
        return tuple(start + row for start in starts for row in range(self.each))


@dataclass(frozen=True)
class Names:
    """The names in one model's files."""

    architecture: Architecture
    config: Mapping[str, Any]

    def targets(self, info: TensorInfo) -> list[Target]:
        """Return the parameters that a tensor becomes; none for a tensor that no model reads.

        Raises CheckpointError for a tensor that is not known.
        """
        if _IGNORED.match(info.name):
            return []
        outer, _, suffix = info.name.rpartition(".")
        if outer in _OUTER:
            return [Target(f"{_OUTER[outer]}.{suffix}", change=self._change(outer, suffix))]
        found = _BLOCK.fullmatch(info.name)
        if found and int(found[1]) >= int(self.config["num_hidden_layers"]) and self.config.get(NEXT_LAYERS):
            return []  # predicts further tokens
        targets = list(self._inner(info, f"layers.{found[1]}.", found[2], found[3] or "weight")) if found else []
        if not targets:
            raise CheckpointError(f"{info.file}: the tensor {info.name!r} is not one that is known here.")
        return targets

    def sources(
        self, names: Collection[str], rename: Callable[[str], str], by_group: bool = False
    ) -> dict[str, tuple[Target, ...]]:
        """Return the tensors of a file that has these parameters, and what each is made of: the reverse of `targets`.

        A parameter that two tensors could hold goes to the first: the architecture's own name, before one of more
        models. `rename` is what the model does to names of a checkpoint.
        """
        most = len(names)  # a layer or an expert has one tensor or more
        layers, experts = (min(int(self.config.get(key) or 0), most) for key in ("num_hidden_layers", "num_experts"))
        inner = dict.fromkeys((*self.architecture.names, *_INNER, *_MERGED, *(_STACKS if experts else ())))
        blocks = (f"blk.{layer}.{name}" for layer in range(layers) for name in inner)
        found: dict[str, tuple[Target, ...]] = {}
        left = set(names)
        stack = (experts, 1, 1)
        for name in (f"{name}.{suffix}" for name in (*_OUTER, *blocks) for suffix in _SUFFIXES):
            for candidate in self._candidates(TensorInfo(name, stack, TYPES[0], Path(), 0), by_group):
                targets = tuple(replace(target, name=rename(target.name)) for target in candidate)
                wanted = {target.name for target in targets}
                if wanted and wanted <= left:
                    found[name] = targets
                    left -= wanted
        return found

    def _candidates(self, info: TensorInfo, by_group: bool) -> Iterator[tuple[Target, ...]]:
        block = _BLOCK.fullmatch(info.name)
        kind = block[2] if block else ""
        if kind != "attn_qkv":
            yield tuple(self.targets(info))
        if block and kind in _MERGED:
            change = "by_group" if by_group and kind == "attn_qkv" else ""
            yield (Target(f"layers.{block[1]}.{_MERGED[kind]}.{block[3]}", change=change),)

    def _change(self, name: str, suffix: str) -> str:
        more = self.architecture.norms_more and name.endswith("norm") and suffix == "weight"
        return "less_one" if more else ""

    def _inner(self, info: TensorInfo, layer: str, name: str, suffix: str) -> Iterator[Target]:
        experts = _EXPERTS.fullmatch(name)
        if name in self.architecture.names:
            yield Target(f"{layer}{self.architecture.names[name]}.{suffix}", change=self._change(name, suffix))
        elif "linear_num_key_heads" in self.config and name in _DELTA:
            yield from self._delta(info, layer, name, suffix)
        elif experts:
            for index in range(info.shape[0]):
                yield Target(f"{layer}mlp.experts.{index}.{experts[1]}_proj.{suffix}", expert=index)
        elif name == "attn_qkv":
            yield from self._projections(info, layer, suffix)
        elif name in ("attn_k_b", "attn_v_b"):
            yield Target(f"{layer}self_attn.kv_b_proj.weight", change="keys" if name == "attn_k_b" else "values")
        elif name == "ssm_a":
            yield Target(f"{layer}mixer.A_log", change="log")
        elif name == "ssm_dt" and "num_heads" in self.config:  # Mamba 2
            yield Target(f"{layer}mixer.dt_bias")
        elif name in _WHOLE:
            yield Target(layer + _WHOLE[name], change="flat")
        elif name in _INNER:
            yield from self._usual(info, layer, name, suffix)

    def _delta(self, info: TensorInfo, layer: str, name: str, suffix: str) -> Iterator[Target]:
        """Yield the gated delta rule's parameters, whose value heads may be in another order, see `ValueHeads`."""
        at, heads = f"{layer}self_attn.", ValueHeads.of(self.config, self.architecture.tiled)
        heads.check(info, name)
        match name:
            case "attn_qkv":
                yield Target(f"{at}in_proj_qkv.{suffix}", rows=heads.order(first=heads.first))
            case "ssm_conv1d":
                yield Target(f"{at}conv1d.weight", change="conv", rows=heads.order(first=heads.first))
            case "attn_gate":
                yield Target(f"{at}in_proj_z.{suffix}", rows=heads.order())
            case "ssm_out":
                yield Target(f"{at}out_proj.{suffix}", columns=heads.order())
            case "ssm_norm":
                yield Target(f"{at}norm.weight", change="flat")
            case "ssm_ba":
                for index, part in enumerate("ba"):
                    yield Target(f"{at}in_proj_{part}.weight", rows=heads.half(index))
            case _:
                yield Target(at + _DELTA[name], change="log" if name == "ssm_a" else "", rows=heads.order(width=1))

    def _usual(self, info: TensorInfo, layer: str, name: str, suffix: str) -> Iterator[Target]:
        own = _INNER[name]
        if name == "ffn_up" and self._holds_gates(info):
            own = "mlp.gate_up_proj"
        elif layer_has_two(self.config) and name in ("attn_norm", "attn_norm_2"):
            own = "post_attention_layernorm" if name == "attn_norm" else "input_layernorm"
        elif name == "attn_norm" and "state_size" in self.config:
            own = "norm"
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
        paired = int(self.config.get(heads) or self.config["num_attention_heads"]) if heads else 0
        change = {"ssm_conv1d": "conv" if suffix == "weight" else "", "ssm_norm": "flat"}.get(
            name, self._change(name, suffix)
        )
        yield Target(f"{layer}{own}.{suffix}", heads=paired if self.architecture.paired else 0, change=change)

    def _holds_gates(self, info: TensorInfo) -> bool:
        return info.shape[0] == 2 * int(self.config.get("intermediate_size") or 0) and len(info.shape) == 2

    def _projections(self, info: TensorInfo, layer: str, suffix: str) -> Iterator[Target]:
        """Yield queries, keys and values of one tensor, one after the other. Raises CheckpointError for other sizes."""
        heads = int(self.config["num_attention_heads"])
        width = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
        start = 0
        for name, count in (
            ("q", heads),
            *dict.fromkeys("kv", int(self.config.get("num_key_value_heads") or heads)).items(),
        ):
            yield Target(f"{layer}self_attn.{name}_proj.{suffix}", start, start + count * width)
            start += count * width
        if start != info.shape[0]:
            raise CheckpointError(
                f"{info.file}: the tensor {info.name!r} has {info.shape[0]} outputs, by the numbers of heads {start}."
            )


def layer_has_two(config: Mapping[str, Any]) -> bool:
    """Return whether the model is a Falcon whose two norms are named by their order, not by what follows them."""
    return bool(config.get("new_decoder_architecture")) and config.get("num_ln_in_parallel_attn") == 2
