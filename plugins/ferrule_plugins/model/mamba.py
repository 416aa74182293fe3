"""Mamba 1 (Gu and Dao 2023) and FalconMamba (Zuo et al. 2024), which adds norms without weights inside its mixers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec, MambaMixer, MambaSpec, MixerDecoder, need


class PlainNorm(nn.Module):
    """A norm without a weight: x / rms(x)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.size, eps=self.eps).to(x.dtype)


def without_attention(ctx: BuildContext, **changes: Any) -> DecoderSpec:
    """Return the description of a model of Mamba layers alone."""
    c = ctx.config
    return DecoderSpec(
        hidden_size=int(need(c, "hidden_size")),
        inner_size=0,
        num_layers=int(need(c, "num_hidden_layers")),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        vocab_size=int(need(c, "vocab_size")),
        block_size=ctx.block_size,
        norm_eps=float(c.get("layer_norm_epsilon", 1e-5)),
        **changes,
    )


class Mamba(MixerDecoder):
    def describe(self, ctx: BuildContext) -> DecoderSpec:
        self.wide_sums = bool(ctx.config.get("residual_in_fp32", True))
        spec = MambaSpec.of(ctx.config, norm=self.inner_norm(ctx))
        self.mixer_spec = replace(spec, inner_size=int(ctx.config.get("intermediate_size") or spec.inner_size))
        return without_attention(ctx, tied=bool(ctx.config.get("tie_word_embeddings", True)))

    def inner_norm(self, ctx: BuildContext) -> Callable[[int], nn.Module] | None:
        """Return a maker of the norms inside a mixer, or None."""
        return None

    def make_mixer(self, index: int) -> nn.Module:
        return MambaMixer(f"layers.{index}.mixer", self.mixer_spec)


class FalconMamba(Mamba):
    def inner_norm(self, ctx: BuildContext) -> Callable[[int], nn.Module] | None:
        eps = float(ctx.config.get("mixer_rms_eps", 1e-6))
        return lambda size: PlainNorm(size, eps)
