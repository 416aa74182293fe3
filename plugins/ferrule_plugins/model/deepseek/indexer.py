"""The lightning indexer of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): which tokens a query attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ferrule.interfaces.adapters import AdapterBank
from ferrule_nn import (
    LatentSpec,
    LayerNorm,
    Linear,
    Rope,
    RopeConfig,
    Rotation,
    TokenAdd,
    need,
    parameter,
    token_add,
    undivided,
)


class HeadWeights(nn.Module):
    """The weights of the indexer's heads for a token. They are never quantized, and computed in float32."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.weight = parameter(heads, hidden_size)
        self._add: TokenAdd | None = None  # what adapters change

    def adapt(self, name: str, bank: AdapterBank) -> bool:
        """Add the adapters' part to the weights."""
        heads, hidden_size = self.weight.shape
        self._add = token_add(bank, undivided(name, hidden_size, heads))
        return self._add is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weights of the heads: x [tokens, hidden] → float32 [tokens, heads]."""
        y = x.float() @ self.weight.float().t()
        return y if self._add is None else self._add(x, y)


class Indexer(nn.Module):
    """A scorer of how much a query wants to see a token: the sum over small heads of weight * relu(query * key).

    Its rotation has its own pairs of features, whatever the attention's has: neighbours if `interleaved`, else halves.
    """

    def __init__(self, config: Mapping[str, Any], latent: LatentSpec, interleaved: bool) -> None:
        super().__init__()
        self.top_k = int(need(config, "index_topk"))
        self.heads, self.dim = int(need(config, "index_n_heads")), int(need(config, "index_head_dim"))
        rope = Rope(RopeConfig.of(config, latent.rope_dim), interleaved)
        self._rope = (rope,)  # in a tuple, so that torch does not register it as a submodule of every layer
        self.wq_b = Linear(latent.q_rank, self.heads * self.dim)
        self.wk = Linear(latent.hidden_size, self.dim)
        self.k_norm = LayerNorm(self.dim, 1e-6)
        self.weights_proj = HeadWeights(latent.hidden_size, self.heads)

    def forward(self, x: torch.Tensor, q: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indexer's queries and keys of tokens x [tokens, hidden] with queries' latents q [tokens, q_rank].

        The weighted queries are float32 [tokens, heads, dim + 1], the last number of which is the weight; the keys are
        [tokens, dim].
        """
        rope, tokens = self._rope[0], len(x)
        keys = self.k_norm(self.wk(x)).unsqueeze(1)
        both = rope.rotate(torch.cat((self.wq_b(q).view(tokens, self.heads, -1), keys), dim=1), rotation)
        weights = self.weights_proj(x) * (self.heads * self.dim) ** -0.5
        return torch.cat((both[:, :-1].float(), weights.unsqueeze(2)), dim=2), both[:, -1]

    def choose(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Choose the tokens that queries [tokens, heads, dim + 1] of the last of `others` tokens see, by keys [others,
        dim] of all of these.

        Returns int64 [tokens, chosen]. Where a query sees fewer tokens than are chosen, later ones are among them.
        """
        count, total = len(queries), len(keys)
        met = (queries[..., :-1] @ keys.float().t()).relu()
        scores = (queries[..., -1:].transpose(1, 2) @ met).squeeze(1)
        unseen = torch.ones_like(scores, dtype=torch.bool).triu(total - count + 1)
        return scores.masked_fill(unseen, float("-inf")).topk(min(self.top_k, total), dim=1).indices
