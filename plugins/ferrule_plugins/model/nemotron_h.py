"""Nemotron-H and Nemotron 3 (NVIDIA 2025): layers of one mixer each: Mamba 2, attention, an MLP, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_nn import (
    MLP,
    Attention,
    DecoderSpec,
    GatedMLP,
    Linear,
    Mamba2Mixer,
    Mamba2Spec,
    MergedLinear,
    MixerDecoder,
    MoE,
    Naming,
    activation,
    first,
    inputs,
    need,
    outputs,
    read_grouped_routing,
    read_moe,
)

_KINDS: Mapping[str, str] = MappingProxyType(
    {"M": "mamba", "linear_attention": "mamba", "*": "attention", "full_attention": "attention", "-": "mlp", "E": "moe"}
)


class PlainExpert(GatedMLP):
    """An expert without a gate, down(act(up(x))), so its first product has one part."""

    def __init__(self, hidden_size: int, inner_size: int, act: str) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = MergedLinear(hidden_size, {"up_proj": inner_size}, split=outputs())
        self.down_proj = Linear(inner_size, hidden_size, split=inputs())
        self.act = activation(act)

    def pack(self) -> None:
        """Do nothing: the fused kernels need a gate, so torch applies this activation."""

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        return self.act(both)


class LatentMoE(MoE):
    """Experts, in a space of their own where `latent_size` says so, and an MLP that all tokens use."""

    def __init__(self, ctx: BuildContext, act: str) -> None:
        c = ctx.config
        spec = read_moe(ctx, read_grouped_routing(ctx, renormalise=bool(c.get("norm_topk_prob", True))))
        latent = int(c.get("moe_latent_size") or 0)
        make = partial(PlainExpert, latent or spec.hidden_size, spec.inner_size, act)
        super().__init__(replace(spec, correction=True, shared_size=0), make)
        self.shared_experts = MLP(spec.hidden_size, int(need(c, "moe_shared_expert_intermediate_size")), act, False)
        self.fc1_latent_proj = Linear(spec.hidden_size, latent) if latent else nn.Identity()
        self.fc2_latent_proj = Linear(latent, spec.hidden_size) if latent else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x)
        y = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), weights, ids, False))
        out: torch.Tensor = y + self.shared_experts(x)
        return out


class NemotronH(MixerDecoder):
    config_defaults = {
        "num_key_value_heads": 8,
        "n_groups": 8,
        "mamba_head_dim": 64,
        "moe_intermediate_size": 7688,
    }
    naming = Naming(
        renames=MixerDecoder.naming.renames,
        ignored=(r"^mtp\.",),  # predicts further tokens
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        kinds = need(c, "layers_block_type", "layer_types", "hybrid_override_pattern")
        self.kinds = [_KINDS.get(kind, kind) for kind in kinds]
        unknown = sorted(set(self.kinds) - set(_KINDS.values()))
        if unknown:
            raise CheckpointError(f"config.json has layers of the kind {unknown[0]!r}, which this model does not have.")
        self.make_experts = partial(LatentMoE, ctx, str(c.get("mlp_hidden_act", "relu2")))
        self.wide_sums = bool(c.get("residual_in_fp32", False))
        self.mamba = Mamba2Spec.of(c, bias=bool(c.get("use_bias", False)), out_bias=bool(c.get("use_bias", False)))
        return DecoderSpec.of(
            ctx,
            num_layers=len(self.kinds),
            head_dim=int(first(c, "head_dim", "attention_head_dim", default=128)),
            norm_eps=float(first(c, "layer_norm_epsilon", "norm_eps", default=1e-5)),
            act=str(c.get("mlp_hidden_act", "relu2")),
            qkv_bias=False,
            out_bias=False,
            windows=(),
        )

    def make_mixer(self, index: int) -> nn.Module:
        spec = self.spec
        match self.kinds[index]:
            case "mamba":
                return Mamba2Mixer(f"layers.{index}.mixer", self.mamba)
            case "attention":
                return Attention(f"layers.{index}.mixer", spec.attention(index))
            case "moe":
                return self.make_experts()
        return MLP(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)
