"""GLM-5 (Z.ai 2026): DeepSeek-V3.2, but some layers attend to what the indexer of an earlier one chose.

The indexers' sharing: https://arxiv.org/abs/2603.12201
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ferrule.errors import CheckpointError
from ferrule.interfaces.model import BuildContext
from ferrule_nn import DecoderSpec
from ferrule_plugins.model.deepseek.v32 import DeepSeekV32

_KINDS: Mapping[str, bool] = MappingProxyType({"full": True, "F": True, "shared": False, "S": False})


class GlmMoeDsa(DeepSeekV32):
    interleaved_indexer = True
    config_defaults = {
        **DeepSeekV32.config_defaults,
        "q_lora_rank": 2048,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        spec = super().describe(ctx)
        c = ctx.config
        kinds = c.get("indexer_types") or c.get("index_topk_pattern")
        if kinds is None:
            every, first = max(int(c["index_topk_freq"]), 1), int(c["index_skip_topk_offset"]) - 1
            self.choosing = [max(index - first, 0) % every == 0 for index in range(spec.num_layers)]
        elif len(kinds) != spec.num_layers or not set(kinds) <= set(_KINDS):
            raise CheckpointError("config.json: 'indexer_types' must say 'full' or 'shared' for each layer.")
        else:
            self.choosing = [_KINDS[kind] for kind in kinds]
        if not self.choosing[0]:
            raise CheckpointError("config.json: 'indexer_types' must give the first layer an indexer.")
        return spec

    def chooses(self, index: int) -> bool:
        return self.choosing[index]
