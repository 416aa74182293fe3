"""Granite 4 (Granite Team 2025): Mamba-2 layers and a few of attention, with or without experts."""

from __future__ import annotations

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, GatedMLP, Mamba2Mixer, Mamba2Spec, MoE, Naming, Rope, need, read_moe, read_routing
from ferrule_plugins.model.granite import Granite

_ATTENDS = ("attention", "full_attention")


class GraniteHybrid(Granite):
    config_defaults = {"rms_norm_eps": 1e-6, "num_local_experts": 8}
    naming = Naming(
        renames=(
            (r"^model\.", ""),
            (r"\.mamba\.", ".self_attn."),
            (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
            (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
            (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
            (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
            (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
        )
    )

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        self.kinds: list[str] = c.get("layer_types") or c.get("layers_block_type") or []
        self.mamba = Mamba2Spec.of(c)
        self.shared_size = int(need(c, "shared_intermediate_size"))
        self.experts = None
        if c.get("num_local_experts"):
            self.experts = read_moe(ctx, read_routing(ctx, renormalise=True), shared_size=self.shared_size)
        return super().describe(ctx)

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        return super().make_rope(ctx) if ctx.config.get("position_embedding_type") == "rope" else None

    def make_attention(self, index: int) -> nn.Module:
        if self.kinds and self.kinds[index] in _ATTENDS:
            return super().make_attention(index)
        return Mamba2Mixer(f"layers.{index}.mamba", self.mamba)

    def make_mlp(self, index: int) -> nn.Module:
        return SharedOnly(self.spec, self.shared_size) if self.experts is None else MoE(self.experts)


class SharedOnly(nn.Module):
    """The shared expert of a mixture that has no other experts; the names of its parameters are the same."""

    def __init__(self, spec: DecoderSpec, size: int) -> None:
        super().__init__()
        self.shared_expert = GatedMLP(spec.hidden_size, size, spec.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.shared_expert(x)
        return y
