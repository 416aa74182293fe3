"""Falcon-H1 (Falcon-LLM Team 2025): Mamba-2 and attention side by side in each layer, and factors everywhere."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Decoder, DecoderSpec, GatedMLP, Mamba2Mixer, Mamba2Spec, Naming, Rotation


class Factors:
    """The factors of config.json, 1 where they are not stated."""

    def __init__(self, ctx: BuildContext) -> None:
        def factor(name: str) -> float:
            return float(ctx.config.get(f"{name}_multiplier") or 1.0)

        self.ssm_in, self.ssm_out, self.key = factor("ssm_in"), factor("ssm_out"), factor("key")
        self.attention_in, self.attention_out = factor("attention_in"), factor("attention_out")
        self.embedding, self.lm_head = factor("embedding"), factor("lm_head")
        self.gate, self.down = map(float, ctx.config.get("mlp_multipliers") or (1.0, 1.0))


class ScaledMLP(GatedMLP):
    """A block that computes down(act(gate(x) * g) * up(x)) * d."""

    def __init__(self, spec: DecoderSpec, factors: Factors) -> None:
        super().__init__(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)
        self.factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down_proj(self.act(gate * self.factors.gate) * up) * self.factors.down
        return y


class ParallelMixer(nn.Module):
    """The sum of a state space's result and attention's."""

    def __init__(self, mamba: nn.Module, self_attn: nn.Module, factors: Factors) -> None:
        super().__init__()
        self.mamba = mamba
        self.self_attn = self_attn
        self.factors = factors

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation | None = None) -> torch.Tensor:
        f = self.factors
        y: torch.Tensor = self.self_attn(x * f.attention_in, ctx, rotation) * f.attention_out
        out: torch.Tensor = self.mamba(x * f.ssm_in, ctx) * f.ssm_out + y
        return out


class FalconH1(Decoder):
    config_defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"^final_layernorm\.", "norm."),
            (r"^(layers\.\d+)\.(mamba|self_attn)\.", r"\1.self_attn.\2."),
            (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.", ".mlp."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        self.factors = Factors(ctx)
        self.mamba = Mamba2Spec.of(
            c,
            out_bias=bool(c.get("projectors_bias", False)),
            gated_norm=bool(c.get("mamba_rms_norm", False)),
            gate_first=not c.get("mamba_norm_before_gate", True),
            multipliers=tuple(map(float, c.get("ssm_multipliers") or ())),
        )
        spec = DecoderSpec.of(ctx)
        return replace(
            spec,
            logits_scale=self.factors.lm_head,
            attention_scale=spec.head_dim**-0.5 * self.factors.key,
        )

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return super().embed(ids, ctx) * self.factors.embedding

    def make_attention(self, index: int) -> nn.Module:
        mamba = Mamba2Mixer(f"layers.{index}.mamba", self.mamba)
        return ParallelMixer(mamba, super().make_attention(index), self.factors)

    def make_mlp(self, index: int) -> nn.Module:
        return ScaledMLP(self.spec, self.factors)
