"""`eagle`: a decoder layer over the target's last hidden states and the tokens that follow them (Li et al. 2024).

A linear layer maps the embedding of a token and the hidden state before it, side by side, to the layer's input; what
the layer gives is a guess of the next hidden state, after the final norm as the target's are. https://arxiv.org/abs/2401.15077

Which optional parts there are is read from the weights: the first layer's norm (the authors' has none), norms of both
inputs, a final norm, biases, and an embedding and a head of its own in the place of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferrule import checkpoint
from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule.interfaces.speculator import SpeculatorContext
from ferrule.small_files import read_json
from ferrule_nn import (
    Attention,
    DecoderSpec,
    Embedding,
    GatedMLP,
    Head,
    Linear,
    Naming,
    Rope,
    RopeConfig,
    Rotation,
    building,
    need,
)
from ferrule_plugins.speculator.chain import ChainHead, ChainSpeculator
from ferrule_plugins.speculator.head_files import HeadFiles, TargetSizes, best, folder_of, size
from ferrule_plugins.speculator.target import Map, TargetParts


def head_config(folder: Path) -> Mapping[str, Any]:
    """Read the head's config.json. Raises CheckpointError."""
    stated = read_json(folder / "config.json")
    return checkpoint.read(folder, None if stated.get("architectures") else {"architectures": ["LlamaForCausalLM"]})


class EagleLayer(nn.Module):
    """A layer like Llama's, without the first norm where the weights have none."""

    def __init__(self, name: str, spec: DecoderSpec, rope: Rope, normed: bool) -> None:
        super().__init__()
        self.input_layernorm = spec.make_norm(spec.hidden_size) if normed else nn.Identity()
        self.self_attn = Attention(name, spec.attention(0), rope)
        self.post_attention_layernorm = spec.make_norm(spec.hidden_size)
        self.mlp = GatedMLP(spec.hidden_size, spec.inner_size, spec.act, spec.mlp_bias)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), ctx, rotation)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class EagleHead(ChainHead):
    naming = Naming(
        renames=(
            (r"^(model\.)+", ""),
            (r"^fusion_fc\.", "fc."),
            (r"^(enorm|embedding_layernorm)\.", "embed_norm."),
            (r"^(hnorm|hidden_states_layernorm)\.", "hidden_norm."),
        )
    )

    def __init__(self, ctx: BuildContext, names: Mapping[str, Any], target: TargetParts) -> None:
        """Make the parts that `names`, those of the weights, are of; others are the target's."""
        super().__init__()
        layers = int(need(ctx.config, "num_hidden_layers"))
        spec = DecoderSpec.of(
            ctx,
            windows=(),  # the head sees everything, whatever the target's layers see
            qkv_bias="layers.0.self_attn.q_proj.bias" in names,
            out_bias="layers.0.self_attn.o_proj.bias" in names,
        )
        self.hidden_size = size = spec.hidden_size
        with building(ctx):
            self.rope = Rope(RopeConfig.of(ctx.config, spec.head_dim))
            own = Embedding(spec.vocab_size, size) if "embed_tokens.weight" in names else None
            self.embed_tokens = own
            self.fc = Linear(2 * size, size, bias="fc.bias" in names)
            self.embed_norm = spec.make_norm(size) if "embed_norm.weight" in names else nn.Identity()
            self.hidden_norm = spec.make_norm(size) if "hidden_norm.weight" in names else nn.Identity()
            self.layers = nn.ModuleList(
                EagleLayer(f"eagle.{i}.attn", spec, self.rope, f"layers.{i}.input_layernorm.weight" in names)
                for i in range(layers)
            )
            self.norm = spec.make_norm(size) if "norm.weight" in names else nn.Identity()
            self.lm_head = Head(size, spec.vocab_size) if "lm_head.weight" in names else None
        self._shared: tuple[Map, Map] = own or target.embedding, self.lm_head or target.head  # no submodules

    def follow(self, ids: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = self.fc(torch.cat((self.embed_norm(self._shared[0](ids)), self.hidden_norm(hidden)), dim=-1))
        rotation = self.rope.at(ctx, x.dtype)
        for layer in self.layers:
            x = layer(x, ctx, rotation)
        return x

    def guess(self, hidden: torch.Tensor) -> torch.Tensor:
        return best(self._shared[1](self.norm(hidden)))


class Eagle(ChainSpeculator):
    own_settings = ("model", "revision")
    usual_tokens = 3
    model_types = ("eagle", "EAGLEModel", "EagleLlamaForCausalLM")

    def make_head(self, context: SpeculatorContext) -> ChainHead:
        folder = folder_of(context, "eagle")
        files, config = HeadFiles(folder, EagleHead.naming), head_config(folder)
        sizes = TargetSizes.of(context)
        sizes.check(folder, hidden=size(config, "hidden_size"), vocab=size(config, "vocab_size"))
        target = TargetParts(context)
        files = target.without_copy(files)
        head = EagleHead(replace(context.build, config=config), files.shapes, target)
        files.fill(head, context.build)
        return head
