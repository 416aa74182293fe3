"""Qwen 3 (Yang et al. 2025): Llama with an RMS norm on each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec
from ferrule_plugins.model.qwen2 import QWEN_DEFAULTS, qwen_windows


class Qwen3(Decoder):
    config_defaults = {**QWEN_DEFAULTS, "head_dim": 128}  # not hidden / heads when unstated

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx, qk_norm="head")
        return replace(spec, windows=qwen_windows(ctx, spec.num_layers))
