"""Mixture of experts, in torch: the reference for the kernels.

The router gives each token a score for each expert; `route` chooses a few and computes their weights. The rows of a
product over experts are the pairs of a token and one of its choices, row = token * top_k + choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The rule by which experts are chosen. Raises ValueError for one that is impossible.

    `scores` are a softmax over all experts (Mixtral, Qwen) or a sigmoid of each (DeepSeek-V3), or those of
    `sparsemixer`, which alone uses `tolerance`. A softmax over the chosen experts alone, as Granite and gpt-oss have
    it, is one over all experts that is renormalised. With `groups`, the experts are cut into as many groups, and chosen
    from the `kept_groups` best alone; a group is as good as the sum of its `group_depth` best scores: 1 for
    DeepSeek-V2, 2 for V3. `renormalise` makes a token's weights add up to 1; `scale` multiplies them after that. Of
    equal scores the first expert's wins.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"
    renormalise: bool = True
    groups: int = 1
    kept_groups: int = 1
    group_depth: int = 1
    scale: float = 1.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid", "sparsemixer"):
            raise ValueError(f"Scores of experts are 'softmax', 'sigmoid' or 'sparsemixer', not {self.scores!r}.")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"{self.num_experts} experts cannot be cut into {self.groups} equal groups.")
        if not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"Of {self.groups} groups {self.kept_groups} cannot be kept.")
        if not 1 <= self.top_k <= self.kept_groups * self.group_size:
            raise ValueError(f"Of {self.kept_groups * self.group_size} experts {self.top_k} cannot be chosen.")
        if self.group_depth not in (1, 2) or self.group_depth > self.group_size:
            raise ValueError(f"A group of {self.group_size} experts cannot be judged by {self.group_depth}.")

    @property
    def group_size(self) -> int:
        return self.num_experts // self.groups


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token: weights float32 and ids int32, both [tokens, top_k], best first.

    logits [tokens, experts]; `bias` [experts] is added to the scores for the choice, and not to the weights (Wang et
    al. 2024, DeepSeek-V3). A score that is not a number is the worst one.
    """
    wide = logits.float()
    if routing.scores == "sparsemixer":
        return sparsemixer(wide, routing)
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
    choice = (scores if bias is None else scores + bias.float()).nan_to_num(nan=torch.finfo(torch.float32).min)
    if routing.groups > 1:
        grouped = choice.view(-1, routing.groups, routing.group_size)
        worth = grouped.sort(dim=2, descending=True).values[..., : routing.group_depth].sum(2)
        worth = worth.clamp(min=torch.finfo(torch.float32).min)
        kept = worth.sort(dim=1, descending=True, stable=True).indices[:, : routing.kept_groups]
        open_groups = torch.zeros_like(worth, dtype=torch.bool).scatter(1, kept, True)
        choice = grouped.masked_fill(~open_groups.unsqueeze(2), float("-inf")).flatten(1)
    ids = choice.sort(dim=1, descending=True, stable=True).indices.narrow(1, 0, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights if routing.scale == 1.0 else weights * routing.scale, ids.int()


def sparsemixer(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts as Phi-3.5-MoE does (Liu et al. 2024, https://arxiv.org/abs/2409.12136). Shapes as for `route`.

    The best remaining expert is chosen, `top_k` times. Its weight is its part of a softmax over those remaining experts
    that are nearly as good: at most 2 * `tolerance` below it, relative to the larger of both magnitudes.
    """
    left, weights, ids = logits, [], []
    for _ in range(routing.top_k):
        best, chosen = left.max(dim=1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * routing.tolerance
        weights.append(left.masked_fill(far, float("-inf")).softmax(1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, 1) * routing.scale, torch.cat(ids, 1).int()


class Arranged(NamedTuple):
    """The pairs of a token and one of its experts, sorted by the expert. All int64.

    `tokens` [pairs] is the token of each; `places` [pairs] says where each pair, counted as token * top_k + choice, has
    come to; `counts` [experts] how many each expert has.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor


def arrange(ids: torch.Tensor, num_experts: int) -> Arranged:
    """Sort the pairs of `ids` int32 [tokens, top_k], stably."""
    order = ids.flatten().sort(stable=True).indices
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
    owners = ids.flatten().long()  # `bincount` would wait for a device
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return Arranged(order // ids.shape[1], places, counts.index_add_(0, owners, torch.ones_like(owners)))


def combine(rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weighted sum of each token's rows, [tokens, size] of the rows' type.

    rows [tokens * top_k, size], weights [tokens, top_k]. `places` int64 [tokens * top_k] says where each row is; None
    where they are in order. Sums are float32.
    """
    rows = rows if places is None else rows.index_select(0, places)
    return (rows.view(*weights.shape, -1).float() * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)


@dataclass(frozen=True)
class Blocks:
    """Rows, sorted by expert and cut into blocks of one expert each. All on the device, in tensors of known size.

    `rows` int32 [blocks * size]: a row's number, or one that is not below `num_rows` where a block is not full; a
    block that no expert has may hold anything. `experts` int32 [blocks]: -1 for those.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    num_rows: int
    size: int


def max_blocks(num_rows: int, num_experts: int, size: int) -> int:
    """Return how many blocks `num_rows` rows need at most, however they are spread: an expert leaves one unfilled."""
    with_rows = min(num_rows, num_experts)
    return (num_rows + with_rows * (size - 1)) // size


def align(ids: torch.Tensor, num_experts: int, size: int) -> Blocks:
    """Sort the rows of `ids` [tokens, top_k] into blocks.

    An id that is not an expert's has no block, such as -1 for an expert elsewhere.
    """
    flat, count = ids.flatten().tolist(), ids.numel()
    found: list[int] = []
    owners: list[int] = []
    for expert in range(num_experts):
        rows = [row for row, owner in enumerate(flat) if owner == expert]
        blocks = -(-len(rows) // size)
        found += rows + [count] * (blocks * size - len(rows))
        owners += [expert] * blocks
    spare = max_blocks(count, num_experts, size) - len(owners)
    rows_of = torch.tensor(found + [count] * (spare * size), dtype=torch.int32, device=ids.device)
    return Blocks(rows_of, torch.tensor(owners + [-1] * spare, dtype=torch.int32, device=ids.device), count, size)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, down(act(gate(x)) * up(x)), [tokens, hidden] of x's type.

    x [tokens, hidden]; gate_up [experts, 2 * inner, hidden]; down [experts, hidden, inner]; weights and ids [tokens,
    top_k], with an id of -1 for an expert that is elsewhere. Products are rounded to x's type, sums are float32.
    """
    rows = x.new_zeros((ids.numel(), x.shape[1]), dtype=torch.float32)
    flat, token = ids.flatten(), torch.arange(ids.numel(), device=ids.device) // ids.shape[1]
    for expert in range(gate_up.shape[0]):
        mine = (flat == expert).nonzero().flatten()
        gate, up = (x[token[mine]].float() @ gate_up[expert].float().t()).chunk(2, dim=1)
        inner = (act(gate).to(x.dtype).float() * up.to(x.dtype).float()).to(x.dtype)
        rows[mine] = inner.float() @ down[expert].float().t()
    rows = (rows * weights.float().reshape(-1, 1)).to(x.dtype).float()
    return rows.view(*ids.shape, -1).sum(1).to(x.dtype)
