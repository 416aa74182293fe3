"""DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): V3, but a query attends to the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.model import ForwardContext, LayerCache
from ferrule_nn import LatentAttention, LatentSpec, LayerNorm, Linear, Rope, RopeConfig, Rotation, need, parameter
from ferrule_plugins.model.deepseek_v3 import DeepSeekV3

_QUERIES_AT_ONCE = 16  # each has keys of its own in memory


class HeadWeights(nn.Module):
    """How much each of the indexer's heads counts for a token. Never quantized; computes in float32."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.weight = parameter(heads, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → float32 [tokens, heads]."""
        return x.float() @ self.weight.float().t()


class Indexer(nn.Module):
    """How much a query wants to see a token: the sum over small heads of weight * relu(query * key).

    Its rotation pairs the halves of its features, whatever the attention's does.
    """

    def __init__(self, config: Mapping[str, Any], latent: LatentSpec) -> None:
        super().__init__()
        self.heads, self.dim = int(need(config, "index_n_heads")), int(need(config, "index_head_dim"))
        self._rope = (Rope(RopeConfig.of(config, latent.rope_dim)),)  # in a tuple: not a submodule of every layer
        self.wq_b = Linear(latent.q_rank, self.heads * self.dim)
        self.wk = Linear(latent.hidden_size, self.dim)
        self.k_norm = LayerNorm(self.dim, 1e-6)
        self.weights_proj = HeadWeights(latent.hidden_size, self.heads)

    def forward(self, x: torch.Tensor, q: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens x [tokens, hidden] with queries' latents q [tokens, q_rank].

        Returns weighted queries float32 [tokens, heads, dim + 1], the last number of which is the weight, and keys
        [tokens, dim].
        """
        rope, tokens = self._rope[0], len(x)
        keys = self.k_norm(self.wk(x)).unsqueeze(1)
        both = rope.rotate(torch.cat((self.wq_b(q).view(tokens, self.heads, -1), keys), dim=1), rotation)
        weights = self.weights_proj(x) * (self.heads * self.dim) ** -0.5
        return torch.cat((both[:, :-1].float(), weights.unsqueeze(2)), dim=2), both[:, -1]

    @staticmethod
    def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Queries [tokens, heads, dim + 1] and keys [others, dim] → float32 [tokens, others]."""
        met = (queries[..., :-1] @ keys.float().t()).relu()
        return (queries[..., -1:].transpose(1, 2) @ met).squeeze(1)


class SparseLatentAttention(LatentAttention):
    """Latent attention to `top_k` tokens. The cache has what they are chosen by beside what is attended to."""

    def __init__(self, name: str, spec: LatentSpec, rope: Rope, config: Mapping[str, Any]) -> None:
        super().__init__(name, spec, rope)
        self.indexer = Indexer(config, spec)
        self.top_k = int(need(config, "index_topk"))

    @property
    def cache(self) -> LayerCache:
        plain = super().cache
        return replace(plain, head_dim=plain.head_dim + self.indexer.dim, value_dim=0, attended=False)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, rotation: Rotation) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        q, latent, turned = self.project(x)
        query, key = self.meet(q, latent, turned, rotation)
        wanted, index_key = self.indexer(x, q, rotation)
        entries = torch.cat((key.squeeze(1), index_key), dim=1)
        sums = [x.new_empty(0, self.spec.num_heads, self.spec.kv_rank)]
        for number, row in enumerate(ctx.rows):
            own = slice(row.first, row.first + row.count)
            known = torch.cat((ctx.recall(self.name, number), entries[own]))
            ctx.keep(self.name, number, entries[own])
            for first in range(0, row.count, _QUERIES_AT_ONCE):
                last = min(first + _QUERIES_AT_ONCE, row.count)
                part = slice(row.first + first, row.first + last)
                sums.append(self._sums(query[part], wanted[part], known[: row.begin + last]))
        return self.finish(torch.cat(sums))

    def _sums(self, query: torch.Tensor, wanted: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Of the last tokens of `known` [tokens, kv_rank + rope_dim + dim], whose queries these are."""
        keys, index_keys = known.tensor_split([query.shape[2]], dim=1)
        count, total = len(query), len(known)
        unseen = torch.ones(count, total, dtype=torch.bool, device=known.device).triu(total - count + 1)
        scores = self.indexer.scores(wanted, index_keys).masked_fill(unseen, float("-inf"))
        chosen = scores.topk(min(self.top_k, total), dim=1).indices
        met = keys[chosen].float()  # [count, chosen, kv_rank + rope_dim]
        weights = (query.float() @ met.transpose(1, 2)) * self.spec.scale
        weights = weights.masked_fill(unseen.gather(1, chosen).unsqueeze(1), float("-inf")).softmax(-1)
        sums: torch.Tensor = (weights @ met[..., : self.spec.kv_rank]).to(query.dtype)
        return sums


class DeepSeekV32(DeepSeekV3):
    config_defaults = {
        **DeepSeekV3.config_defaults,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    }

    def make_attention(self, index: int) -> nn.Module:
        return SparseLatentAttention(f"layers.{index}.attn", self.latent, self.rope, self.config)
