"""Nemotron-4 and Minitron (Parmar et al. 2024): a plain MLP with squared ReLU, norms with weights stored less one."""

from __future__ import annotations

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class Nemotron(Decoder):
    config_defaults = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx, norm="layer", norm_offset=1.0, gated=False)
