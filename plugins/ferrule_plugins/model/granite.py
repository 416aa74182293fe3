"""Granite 3 (Granite Team 2024): Llama with a factor on embeddings, residuals, attention scores and logits."""

from __future__ import annotations

import torch

from ferrule.interfaces.model import BuildContext, ForwardContext
from ferrule_nn import Decoder, DecoderSpec


class Granite(Decoder):
    def describe(self, ctx: BuildContext) -> DecoderSpec:
        def factor(name: str) -> float:
            return float(ctx.config.get(name, 1.0))

        return DecoderSpec.of(
            ctx,
            residual_scale=factor("residual_multiplier"),
            attention_scale=factor("attention_multiplier"),
            logits_scale=1.0 / factor("logits_scaling"),
        )

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        self.embedding_multiplier = float(ctx.config.get("embedding_multiplier", 1.0))

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return super().embed(ids, ctx) * self.embedding_multiplier
