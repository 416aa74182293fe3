"""Mistral 7B and its family (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Attention, Decoder, DecoderSpec


class Mistral(Decoder):
    """A decoder with a window in every layer. `sliding_window` null turns the window off; a file that does not mention
    it means 4096.
    """

    config_defaults = {"num_key_value_heads": 8, "sliding_window": 4096}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx)
        window = int(ctx.config["sliding_window"] or 0) if ctx.sliding_window else 0
        return replace(spec, windows=(window,) * spec.num_layers)


class Ministral(Decoder):
    """A decoder with a window in the layers that `layer_types` names, in all where there is no such list."""

    config_defaults = Mistral.config_defaults


class GrowingAttention(Attention):
    """An attention whose queries grow with the logarithm of their position, in steps of the original context: sharper
    where it is long.
    """

    def __init__(self, beta: float, step: int, *attention: Any) -> None:
        super().__init__(*attention)
        self.beta, self.step = beta, step

    def prepare(self, heads: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        growth = 1 + self.beta * torch.log(1 + torch.floor(ctx.positions / self.step))
        heads[:, : self.spec.num_heads] *= growth.to(heads.dtype).view(-1, 1, 1)
        return heads


class Ministral3(Mistral):
    """Ministral 3 (Mistral AI 2025): with YaRN, and `GrowingAttention`."""

    config_defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    def make_attention(self, index: int) -> nn.Module:
        rope, spec = self.config.get("rope_parameters") or {}, self.spec.attention(index)
        beta, step = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        layer = (f"layers.{index}.attn", spec, self.rope_of(index))
        return GrowingAttention(float(beta), int(step), *layer) if beta and step else Attention(*layer)


class Mistral3TextPart(Ministral3):
    """The text part of Mistral Small 3.1 and later, and of Ministral 3, which have images: one or the other's numbers.

    Files state `sliding_window`, whose default would be another in each.
    """

    config_defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    naming = Ministral3.naming.of_text_part()
