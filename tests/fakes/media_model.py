"""A model that sees: what an architecture with media does beyond one with text, in as few numbers as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ferrule.interfaces.model import AttentionOptions, BuildContext, ForwardContext, Generates, LayerCache, Model
from ferrule.types import CacheGroup, MediaItem

_SCALE = 0.25


class SeeingModel(nn.Module, Model, Generates):
    """One layer of attention over tokens and images: `data["pixels"]` float32 [count, 3] with a `grid` (t, h, w).

    Positions have three numbers, as in multimodal rotary embeddings (Qwen2-VL, https://arxiv.org/abs/2409.12191): an
    image's tokens count rows and columns from where it begins, and text goes on behind the largest number.
    """

    position_numbers = 3

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        vocab, size = ctx.config["vocab_size"], ctx.config["hidden_size"]
        self.table = nn.Parameter(torch.empty(vocab, size, dtype=ctx.dtype, device=ctx.device))
        self.eye = nn.Parameter(torch.empty(3, size, dtype=ctx.dtype, device=ctx.device))
        self.places = nn.Parameter(torch.empty(3, size, dtype=ctx.dtype, device=ctx.device))
        self.block_size = ctx.block_size
        self.num_encoded = 0

    def cache_specs(self) -> dict[str, LayerCache]:
        return {"layer": LayerCache(CacheGroup("full", self.block_size), 1, self.table.shape[1])}

    def embed_size(self) -> int:
        return self.table.shape[1]

    def encode(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
        self.num_encoded += len(items)
        return [self._see(item) for item in items]

    def _see(self, item: MediaItem) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(item.data["pixels"].data), dtype=torch.float32).view(item.count, 3)
        return pixels.to(self.eye) @ self.eye

    def positions(self, length: int, media: Sequence[MediaItem]) -> np.ndarray[Any, np.dtype[np.int64]]:
        found, done, place = np.zeros((3, length), np.int64), 0, 0
        for item in media:
            text = item.start - done
            found[:, done : item.start] = np.arange(place, place + text)
            place, done = place + text, item.start + item.count
            found[:, item.start : done] = place + np.stack(np.unravel_index(np.arange(item.count), item.grid))
            place += max(item.grid)
        found[:, done:] = np.arange(place, place + length - done)
        return found

    def embed(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.table[ids]
        if ctx.embeds is not None:
            x = x.index_copy(0, ctx.embeds.tokens, ctx.embeds.data.to(x.dtype))
        return x + torch.sin(ctx.positions.to(x.dtype).t() * 0.7) @ self.places

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.embed(ids, ctx)
        heads = x.unsqueeze(1)
        return x + ctx.attend("layer", heads, heads, heads, AttentionOptions(scale=_SCALE)).squeeze(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.table.t()).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own, filled = dict(self.named_parameters()), set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            filled.add(name)
        return filled

    @torch.inference_mode()
    def alone(self, ids: Sequence[int], num_prompt: int, media: Sequence[MediaItem]) -> torch.Tensor:
        """Return the logits [tokens, vocab] from the definitions: in one pass, without a cache."""
        x, positions = self.table[torch.tensor(ids)], np.zeros((3, len(ids)), np.int64)
        for item in media:
            x[item.start : item.start + item.count] = self._see(item)
        positions[:, :num_prompt] = self.positions(num_prompt, media)
        behind = positions[:, :num_prompt].max() + 1
        positions[:, num_prompt:] = np.arange(behind, behind + len(ids) - num_prompt)
        x = x + torch.sin(torch.from_numpy(positions).to(x.dtype).t() * 0.7) @ self.places
        scores = (x @ x.t() * _SCALE).masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
        return self.logits(x + scores.softmax(-1) @ x)
