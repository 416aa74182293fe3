"""Mistral 7B and its family (Jiang et al. 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class Mistral(Decoder):
    """`sliding_window` null turns the window off; a file that does not mention it means 4096."""

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx)
        window = int(ctx.config.get("sliding_window", 4096) or 0) if ctx.sliding_window else 0
        return replace(spec, windows=(window,) * spec.num_layers)
