"""AFM (Arcee AI 2025): Llama with a plain MLP and squared ReLU."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class Arcee(Decoder):
    config_defaults = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, gated=False)
