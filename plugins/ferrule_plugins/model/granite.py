"""Granite 3 (Granite Team 2024): Llama with a factor on embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule.nn import Decoder, DecoderSpec


class Granite(Decoder):
    def describe(self, ctx: BuildContext) -> DecoderSpec:
        def factor(name: str) -> float:
            return float(ctx.config.get(name, 1.0))

        return DecoderSpec.of(
            ctx,
            embedding_scale=factor("embedding_multiplier"),
            residual_scale=factor("residual_multiplier"),
            attention_scale=factor("attention_multiplier"),
            logits_scale=1.0 / factor("logits_scaling"),
        )
