"""Baichuan 1 and 2 (Yang et al. 2023): Llama with merged projections; the 13B models have linear biases (ALiBi)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from ferrule.interfaces.model import BuildContext
from ferrule_nn import Decoder, DecoderSpec, Naming, alibi_slopes

_VOCABULARY_2 = 125696  # of version 2, whose files do not tell the version


class Baichuan(Decoder):
    """The decoder of both sizes that share this name; only 7B, with a hidden size of 4096, has rotary positions.

    Version 2 divides each row of the head by its length, here when it is loaded.
    """

    naming = Naming(renames=((r"^model\.", ""), (r"\.W_pack\.", ".qkv_proj.")))

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = DecoderSpec.of(ctx)
        return spec if spec.hidden_size == 4096 else replace(spec, alibi_slopes=alibi_slopes(spec.num_heads))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(self._with_head(weights) if self.spec.vocab_size == _VOCABULARY_2 else weights)

    @staticmethod
    def _with_head(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, F.normalize(tensor) if name == "lm_head.weight" else tensor


class Baichuan7B(Baichuan):
    """The first 7B model's name: always with rotary positions."""

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        return DecoderSpec.of(ctx)
