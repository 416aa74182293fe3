"""`cpu`: paged attention with rows of like length computed together.

A step's rows are cut into chunks of at most `CHUNK` queries, fewer where the context is long: keys are in the cache
before anything is read, so the chunks of a row are independent, and the half of the scores that causality hides is
mostly not computed. Pieces of like length form a bucket, padded to its longest; a bucket's gathered keys and values
stay small enough for the CPU's caches.

A row's result has the same bits in any bucket, so that a request's samples do not depend on its neighbours, in
bfloat16 neither. torch's kernel works on tiles of `TILE` queries by `BLOCK` keys and sums over vectors of keys: masked
keys add zero to a sum whose order stays, as long as queries fill their tiles and the first block ends with a whole
vector (`LANES`). Rows with more keys share a bucket with rows that have as many. How a prompt is cut changes no bit
either, but for chunks of one token and contexts beyond one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.interfaces.platform import DeviceCaps
from ferrule_kernels import attention as kernel

CHUNK = 128  # queries; from 192 on torch's tiles have another size
TILE = 32  # queries
SCORES = 1 << 21  # of one bucket and head
LANES = 32  # keys
BLOCK = 512  # keys
BUCKET = 8192  # gathered tokens, unless one chunk alone has more

LongArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Bucket:
    """Pieces that are computed together: `rows` of them, each padded to `queries` and `span` keys."""

    rows: int
    queries: int
    span: int
    tokens: torch.Tensor  # [rows * queries] int64, which of the step's tokens; padding repeats the chunk's first
    slots: torch.Tensor  # [rows * span] int64
    q_positions: torch.Tensor  # [rows, queries] int64
    k_positions: torch.Tensor  # [rows, span] int64
    real: torch.Tensor | None  # [rows * queries] bool, where some queries are padding
    seen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by window and chunk

    def mask(self, window: int, chunk: int) -> torch.Tensor:
        """Return the mask [rows, queries, span] bool, made once for all layers with this window and chunk."""
        if (window, chunk) not in self.seen:
            self.seen[window, chunk] = kernel.visible(self.q_positions, self.k_positions, window, chunk)
        return self.seen[window, chunk]


@dataclass(frozen=True)
class CpuPlan:
    layout: AttentionLayout
    buckets: tuple[Bucket, ...]


class CpuAttention(AttentionBackend):
    """A backend that is vectorised over the rows of a bucket, without Python per row in a layer."""

    features = frozenset({"latent", "chunk"})

    @classmethod
    def refuses(cls, spec: LayerCache, options: AttentionOptions, caps: DeviceCaps, dtype: torch.dtype) -> str | None:
        return None if "host_memory" in caps.features else f"runs on CPUs only, not on {caps.platform}"

    @classmethod
    def cache_type(cls, name: str, dtype: torch.dtype) -> torch.dtype | None:
        return kernel.cache_type(name, dtype)

    def cache_shape(self, spec: LayerCache, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.group.block_size, 1 if spec.value_dim else 2, spec.num_kv_heads, spec.head_dim)

    def plan(self, layout: AttentionLayout) -> CpuPlan:
        return CpuPlan(layout, tuple(_bucket(layout, span, members) for span, members in _group(_pieces(layout))))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        options: AttentionOptions,
    ) -> torch.Tensor:
        layout: AttentionLayout = plan.layout
        flat = cache.flatten(0, 1)
        kernel.write_cache(flat, layout.slot_mapping, k, v)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for bucket in plan.buckets:
            result = self._attend(q, flat, bucket, options)[..., : v.shape[2]]
            if bucket.real is None:
                out.index_copy_(0, bucket.tokens, result)
            else:
                out[bucket.tokens[bucket.real]] = result[bucket.real]
        return out

    def _attend(self, q: torch.Tensor, flat: torch.Tensor, bucket: Bucket, options: AttentionOptions) -> torch.Tensor:
        """Attend in one bucket: [rows * queries, heads, dim]; of latent keys, only the numbers that are values."""
        gathered = kernel.read_cache(flat, bucket.slots, q.dtype).view(bucket.rows, bucket.span, *flat.shape[1:])
        keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, -1].transpose(1, 2)
        queries = q.index_select(0, bucket.tokens).view(bucket.rows, bucket.queries, *q.shape[1:]).transpose(1, 2)
        seen = bucket.mask(options.window, options.chunk)
        if kernel.is_plain(options):
            out = kernel.attend_sdpa(queries, keys, values, seen, options.scale)
        else:
            distance = bucket.q_positions.unsqueeze(-1) - bucket.k_positions.unsqueeze(-2)
            out = kernel.attend_math(queries, keys, values, seen, options, distance)
        return out.transpose(1, 2).reshape(-1, *q.shape[1:])


def _pieces(layout: AttentionLayout) -> LongArray:
    """Cut rows into chunks [chunks, 5].

    A chunk is its row, first token, queries, position of the first query, and first key position that any of them sees.
    """
    counts = np.asarray(layout.query_lens_host, dtype=np.int64)
    lengths = np.asarray(layout.context_lens_host, dtype=np.int64)
    size = np.clip(SCORES // lengths, TILE, CHUNK)
    cuts = -(-counts // size)
    row = np.repeat(np.arange(len(counts)), cuts)
    offset = (np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * size[row]
    queries = np.minimum(counts[row] - offset, size[row])
    position = lengths[row] - counts[row] + offset
    first = np.maximum(position - layout.window + 1, 0) if layout.window else np.zeros_like(position)
    token = (np.cumsum(counts) - counts)[row] + offset
    return np.stack((row, token, queries, position, first), axis=1)


def _group(chunks: LongArray) -> list[tuple[int, LongArray]]:
    """Group chunks into buckets (span, chunks), longest first.

    A bucket ends where padding would exceed half of the work, or the bucket its size.
    """
    spans = -(-(chunks[:, 3] + chunks[:, 2] - chunks[:, 4]) // LANES) * LANES
    order = np.lexsort((-spans, -chunks[:, 2]))
    groups: list[tuple[int, list[int]]] = []
    queries = 0
    for index in order.tolist():
        own_queries, own_span = int(chunks[index, 2]), int(spans[index])
        span, members = groups[-1] if groups else (0, [])
        padded = (len(members) + 1) * max(span, own_span)
        near = max(span, own_span) <= BLOCK and (2 * own_span > span or span <= 2 * LANES)
        alike = (
            (near or own_span == span)
            and (2 * own_queries > queries or queries <= TILE)
            and (own_queries == 1) == (queries == 1)
        )
        if groups and alike and padded <= BUCKET and padded * queries <= SCORES:
            members.append(index)
            groups[-1] = (max(span, own_span), members)
        else:
            groups.append((own_span, [index]))
            queries = own_queries
    return [(span, chunks[members]) for span, members in groups]


def _bucket(layout: AttentionLayout, span: int, chunks: LongArray) -> Bucket:
    row, token, queries, position, first = (torch.from_numpy(np.ascontiguousarray(column)) for column in chunks.T)
    stop = position + queries
    most = int(queries.max())
    most = most if most == 1 else -(-most // TILE) * TILE
    table = layout.block_table.index_select(0, row)
    slots, k_positions = kernel.kv_slots(table, first, stop, span, layout.block_size)
    steps = torch.arange(most)
    real = steps < queries.unsqueeze(1)
    tokens = token.unsqueeze(1) + steps.where(real, 0)
    q_positions = position.unsqueeze(1) + steps.where(real, 0)
    return Bucket(
        rows=len(chunks),
        queries=most,
        span=span,
        tokens=tokens.flatten(),
        slots=slots.flatten(),
        q_positions=q_positions,
        k_positions=k_positions,
        real=None if bool(real.all()) else real.flatten(),
    )
