"""Gemma 4 (Gemma Team 2026): Gemma 3 with two kinds of heads, shared keys, inputs by layer, experts beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import (
    DecoderSpec,
    GatedMLP,
    Naming,
    Rope,
    RopeConfig,
    read_moe,
    read_routing,
)
from ferrule_plugins.model.gemma4.layer import RENAMES, ExpertsBeside, Gemma4Layer
from ferrule_plugins.model.gemma_sharing import SharingDecoder
from ferrule_plugins.model.sharing_attention import LayerInputs


class Gemma4(SharingDecoder):
    layer_class = Gemma4Layer
    naming = Naming(renames=(*SharingDecoder.naming.renames, *RENAMES))
    config_defaults = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        if c.get("use_bidirectional_attention") == "all":
            raise CheckpointError("config.json: 'use_bidirectional_attention' makes this Gemma 4 an encoder.")
        spec = DecoderSpec.of(
            ctx,
            period=6,
            qk_norm="head",
            act=str(c["hidden_activation"]),
            logits_soft_cap=float(c.get("final_logit_softcapping") or 0.0),
        )
        last = spec.num_layers - 1  # always sees everything
        return replace(
            spec,
            embedding_scale=spec.hidden_size**0.5,
            sliding=(*spec.sliding[:last], False),
            windows=(*spec.windows[:last], 0),
        )

    def changes_of(self, index: int) -> dict[str, Any]:
        """Return a layer's own numbers: new files have `per_layer_config`, older ones the numbers of all layers without
        a window.
        """
        c = self.config
        own = {}
        if "per_layer_config" in c:
            own = c["per_layer_config"].get(str(index), {})
        elif not self.spec.sliding[index]:
            heads = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
            own = {"head_dim": c["global_head_dim"], "num_key_value_heads": heads}
        names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
        return {name: int(own[key]) for key, name in names.items() if own.get(key)}

    def make_rope(self, ctx: BuildContext) -> Rope | None:
        full = self.spec.num_layers - 1
        head_dim = int(self.changes_of(full).get("head_dim", self.spec.head_dim))
        return Rope(RopeConfig.of(ctx.config, head_dim, "full_attention"))

    def make_positions(self, ctx: BuildContext) -> None:
        super().make_positions(ctx)
        experts = bool(ctx.config.get("enable_moe_block"))
        self.moe = read_moe(ctx, read_routing(ctx, renormalise=True), act=self.spec.act) if experts else None

    def make_experts(self) -> nn.Module | None:
        return None if self.moe is None else ExpertsBeside(self.moe, self.spec.make_norm, self.spec.norm_eps)

    def make_mlp(self, index: int) -> nn.Module:
        spec, double = self.spec, self.config.get("use_double_wide_mlp") and self.donor(index) is not None
        return GatedMLP(spec.hidden_size, spec.inner_size * (2 if double else 1), spec.act)

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.embed(ids, ctx)
        own, given = self.own_inputs(ids, x), LayerInputs(ctx, None, {}, None)
        for index, (layer, rotation) in enumerate(zip(self.layers, self.rotations(ctx, x.dtype), strict=True)):
            given.rotation, given.own = rotation, None if own is None else own[:, index]
            x = layer(x, given)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class Gemma4TextPart(Gemma4):
    """The text part of Gemma 4 with images and sound."""

    naming = Gemma4.naming.of_text_part()
