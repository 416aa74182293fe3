"""Gemma (Gemma Team 2024): Llama with scaled embeddings, a GELU, and norms whose weights are stored less one."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec


class Gemma(Decoder):
    config_defaults = {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        """Return the description of the decoder. `gelu` in a file means its approximation, which the model was trained
        with.
        """
        act = str(ctx.config["hidden_act"])
        spec = DecoderSpec.of(ctx, norm_offset=1.0, act="gelu_pytorch_tanh" if act == "gelu" else act)
        return replace(spec, embedding_scale=spec.hidden_size**0.5)
