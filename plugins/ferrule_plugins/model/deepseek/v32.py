"""DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): V3, but a query attends to the tokens that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ferrule.interfaces.model import BuildContext, ForwardContext, LayerCache
from ferrule_nn import DecoderSpec, LatentAttention, LatentSpec, Rope, Rotation
from ferrule_plugins.model.deepseek.indexer import Indexer
from ferrule_plugins.model.deepseek.v3 import DeepSeekV3

_QUERIES_AT_ONCE = 16  # each has keys of its own in memory


class SparseLatentAttention(LatentAttention):
    """Latent attention to chosen tokens; without an indexer, to those that the layer before chose.

    `choices`, which all layers of a model share, has what the last indexer chose for each part of the step. The cache
    has what tokens are chosen by beside what is attended to.
    """

    def __init__(
        self, name: str, spec: LatentSpec, rope: Rope, indexer: Indexer | None, choices: list[torch.Tensor]
    ) -> None:
        super().__init__(name, spec, rope)
        self.indexer = indexer
        self._choices = choices  # of [queries at once, tokens]

    @property
    def cache(self) -> LayerCache:
        plain = super().cache
        more = 0 if self.indexer is None else self.indexer.dim
        return replace(plain, head_dim=plain.head_dim + more, value_dim=0, attended=False)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation) -> torch.Tensor:
        """Attend to the tokens that the indexer chooses: x [tokens, hidden] → [tokens, hidden]."""
        q, latent, turned = self.project(x)
        query, key = self.meet(q, latent, turned, rotation)
        indexer, wanted, index_key = self.indexer, x, key[:, 0, :0]
        if indexer is not None:
            wanted, index_key = indexer(x, q, rotation)
            self._choices.clear()
        entries = torch.cat((key.squeeze(1), index_key), dim=1)
        sums: list[torch.Tensor] = []
        for number, row in enumerate(ctx.rows):
            own = slice(row.first, row.first + row.count)
            past = torch.cat((ctx.recall(self.name, number), entries[own]))
            ctx.keep(self.name, number, entries[own])
            for first in range(0, row.count, _QUERIES_AT_ONCE):
                last = min(first + _QUERIES_AT_ONCE, row.count)
                part = slice(row.first + first, row.first + last)
                known = past[: row.begin + last]
                if indexer is not None:
                    self._choices.append(indexer.choose(wanted[part], known[:, -indexer.dim :]))
                sums.append(self._sums(query[part], self._choices[len(sums)], known))
        none = x.new_empty(0, self.spec.num_heads, self.spec.kv_rank)
        return self.finish(torch.cat((none, *sums)))

    def _sums(self, query: torch.Tensor, chosen: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of latents, for the queries of the last tokens of `known` [tokens, kv_rank +
        rope_dim …].
        """
        count, total = len(query), len(known)
        own = torch.arange(total - count, total, device=chosen.device).unsqueeze(1)
        met = known[chosen, : query.shape[2]].float()  # [count, chosen, kv_rank + rope_dim]
        weights = (query.float() @ met.transpose(1, 2)) * self.spec.scale
        weights = weights.masked_fill((chosen > own).unsqueeze(1), float("-inf")).softmax(-1)
        sums: torch.Tensor = (weights @ met[..., : self.spec.kv_rank]).to(query.dtype)
        return sums


class DeepSeekV32(DeepSeekV3):
    interleaved_indexer = False
    config_defaults = {
        **DeepSeekV3.config_defaults,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    }

    def describe(self, ctx: BuildContext) -> DecoderSpec:
        self.choices: list[torch.Tensor] = []
        return super().describe(ctx)

    def chooses(self, index: int) -> bool:
        """Return whether layer `index` has an indexer of its own."""
        return True

    def make_attention(self, index: int) -> nn.Module:
        own = Indexer(self.config, self.latent, self.interleaved_indexer) if self.chooses(index) else None
        return SparseLatentAttention(f"layers.{index}.attn", self.latent, self.rope, own, self.choices)
