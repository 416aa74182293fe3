"""Gemma 3n (Gemma Team 2025): four streams of hidden states, and what Gemma 4 kept of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import DecoderSpec, GatedMLP, Linear
from ferrule_plugins.model.gemma3n.altup import SparseMLP, as_large
from ferrule_plugins.model.gemma3n.layer import Gemma3nLayer
from ferrule_plugins.model.gemma_sharing import SharingDecoder
from ferrule_plugins.model.sharing_attention import LayerInputs


class Gemma3n(SharingDecoder):
    layer_class = Gemma3nLayer
    config_defaults = {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        c = ctx.config
        spec = DecoderSpec.of(
            ctx,
            period=5,
            inner_size=0,  # see `make_mlp`
            qk_norm="head",
            act=str(c["hidden_activation"]),
            logits_soft_cap=float(c["final_logit_softcapping"] or 0.0),
        )
        return replace(spec, embedding_scale=spec.hidden_size**0.5)

    def make_positions(self, ctx: BuildContext) -> None:
        super().make_positions(ctx)
        hidden, more = self.spec.hidden_size, int(self.config["altup_num_inputs"]) - 1
        self.altup_projections = nn.ModuleList(Linear(hidden, hidden) for _ in range(more))
        self.altup_unembed_projections = nn.ModuleList(Linear(hidden, hidden) for _ in range(more))

    def make_mlp(self, index: int) -> nn.Module:
        spec, inner = self.spec, self.config["intermediate_size"]
        sparsity = self.config.get("activation_sparsity_pattern")
        if sparsity is None:  # the first ten of a model with more
            sparsity = [0.95 if layer < 10 < spec.num_layers else 0.0 for layer in range(spec.num_layers)]
        share = float(sparsity[index] if isinstance(sparsity, list) else sparsity)
        size = int(inner[index] if isinstance(inner, list) else inner)
        return SparseMLP(spec, size, share) if share > 0 else GatedMLP(spec.hidden_size, size, spec.act)

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.embed(ids, ctx)
        own: Any = self.own_inputs(ids, x)
        streams = torch.stack([x, *(as_large(project(x), x) for project in self.altup_projections)])
        given = LayerInputs(ctx, None, {}, None)
        for index, (layer, rotation) in enumerate(zip(self.layers, self.rotations(ctx, x.dtype), strict=True)):
            given.rotation, given.own = rotation, own[:, index]
            streams = layer(streams, given)
        first, *others = streams
        projected = zip(self.altup_unembed_projections, others, strict=True)
        out = torch.stack([first, *(as_large(project(other), first) for project, other in projected)])
        hidden: torch.Tensor = self.norm(out.mean(0))
        return hidden


class Gemma3nTextPart(Gemma3n):
    """The text part of Gemma 3n with images and sound."""

    naming = Gemma3n.naming.of_text_part()
