"""gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925): attention sinks, clamped gates, biases everywhere.

Checkpoints have the rows of gates and ups in turn, in mxfp4 (`ferrule_plugins.quantization.mxfp4`) or as floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import (
    Attention,
    AttentionSpec,
    DecoderSpec,
    GatedMLP,
    MoE,
    MoEDecoder,
    MoESpec,
    Naming,
    Rope,
    outputs,
    parameter,
    read_moe,
    read_routing,
)


class SinkAttention(Attention):
    """An attention in which each head has one more key, without a value: `sinks` [heads] are the scores of these
    keys.
    """

    def __init__(self, name: str, spec: AttentionSpec, rope: Rope | None) -> None:
        super().__init__(name, spec, rope)
        self.sinks = parameter(spec.num_heads, division=outputs().of(spec.num_heads))
        self.options = replace(self.options, sinks=self.sinks.detach())


class ClampedMLP(GatedMLP):
    """A block that computes down((up(x) + 1) * g * sigmoid(alpha * g)), g = gate(x); both are clamped at `limit`."""

    def __init__(self, hidden_size: int, inner_size: int, alpha: float, limit: float) -> None:
        super().__init__(hidden_size, inner_size, bias=True)
        self.alpha, self.limit = alpha, limit

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).to(both.dtype)


class GptOss(MoEDecoder):
    naming = Naming(
        renames=((r"^model\.", ""), (r"\.mlp\.router\.", ".mlp.gate.")),
        transposed=(r"\.experts\.(gate_up|down)_proj$",),
    )
    config_defaults = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, period=2)

    def describe_experts(self, ctx: BuildContext) -> MoESpec:
        return read_moe(ctx, read_routing(ctx, renormalise=True), router_bias=True)

    def make_attention(self, index: int) -> nn.Module:
        return SinkAttention(f"layers.{index}.attn", self.spec.attention(index), self.rope_of(index))

    def make_mlp(self, index: int) -> nn.Module:
        numbers = float(self.config["swiglu_alpha"]), float(self.config["swiglu_limit"])
        return MoE(self.moe, partial(ClampedMLP, self.moe.hidden_size, self.moe.inner_size, *numbers))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(_gates_first(weights))


def _gates_first(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Reorder the tensors of `gate_up_proj`, whose outputs are gates and ups in turn: first all gates, then all ups."""
    for name, tensor in weights:
        if ".experts.gate_up_proj" in name:
            axis = 2 if name.endswith("gate_up_proj") else 1  # the others are [experts, outputs, …]
            turns = torch.arange(tensor.shape[axis], device=tensor.device).view(-1, 2).t().flatten()
            tensor = tensor.index_select(axis, turns)
        yield name, tensor
