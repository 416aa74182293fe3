"""Mamba 2 (Dao and Gu 2024): layers of state spaces with one decay for each head, and nothing else."""

from __future__ import annotations

from torch import nn

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, Mamba2Mixer, Mamba2Spec, MixerDecoder
from ferrule_plugins.model.mamba import without_attention


class Mamba2(MixerDecoder):
    config_defaults = {"n_groups": 8, "head_dim": 64}

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        self.wide_sums = bool(ctx.config.get("residual_in_fp32", True))
        self.mixer_spec = Mamba2Spec.of(ctx.config)
        return without_attention(ctx, tied=bool(ctx.config.get("tie_word_embeddings", False)))

    def make_mixer(self, index: int) -> nn.Module:
        return Mamba2Mixer(f"layers.{index}.mixer", self.mixer_spec)
