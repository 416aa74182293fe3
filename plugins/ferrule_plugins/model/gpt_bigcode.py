"""GPTBigCode, the first StarCoder (Li et al. 2023): GPT-2 whose heads share one key and value head."""

from __future__ import annotations

from dataclasses import replace

from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec
from ferrule_plugins.model.gpt2 import GPT2


class GPTBigCode(GPT2):
    """A GPT-2 with one key head. `multi_query` false: as many key heads as query heads, and a merged tensor with the
    rows of each head in turn.
    """

    config_defaults = {**GPT2.config_defaults, "activation_function": "gelu_pytorch_tanh", "multi_query": True}
    naming = replace(GPT2.naming, transposed=())

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = super().describe(ctx)
        if ctx.config["multi_query"]:
            return replace(spec, num_kv_heads=1)
        return replace(spec, qkv_by_group=True)
