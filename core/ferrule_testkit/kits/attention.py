"""The kit of attention backends: comparison with attention in float64, over shapes, masks and block tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ferrule.assembly.choose import lacking_feature
from ferrule.interfaces.attention import AttentionBackend, AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.types import CacheGroup
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

Step = Sequence[tuple[int, int]]  # (query tokens, context tokens) of each row

STEPS: Mapping[str, Step] = {
    "decode": [(1, 1), (1, 17), (1, 33), (1, 33)],
    "prefill": [(5, 5), (9, 9), (1, 1)],
    "chunks": [(4, 19), (7, 7), (1, 40), (3, 3), (2, 29)],
}
LONG: Step = [(300, 306), (1, 300), (2, 2)]
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 2.0},
    "soft cap and window": {"soft_cap": 2.0, "window": 9},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "sinks": {"sinks": (0.1, -1.0, 2.0, 0.0)},
    "chunk": {"chunk": 6},
}
_BLOCKS = 200


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    block_size: int = 4
    dtype: str = "float32"
    value_dim: int = 0  # values are the first numbers of the keys


class AttentionKit(Kit):
    """A backend computes what attention is defined to be, from the tokens that a row may see and from nothing else.

    What `refuses` declines is not asked for; plain attention in the first of `dtypes` is taken in some size.
    """

    kind = "attention"
    device: str = "cpu"
    platform: str = "cpu"
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16")
    block_sizes: Sequence[int] = (1, 4, 16)
    head_dims: Sequence[int] = (8, 16, 64)

    # ------------------------------------------------------------------------------------ promises

    def test_equals_the_definition(self) -> None:
        """Equal float64 attention for decoding rows, whole prompts and chunks of prompts in one step."""
        for block_size in self.block_sizes:
            for name, step in STEPS.items():
                self.check({}, step, self._shape(block_size=block_size), f"{name}, block size {block_size}")

    def test_windows_soft_caps_slopes_and_sinks(self) -> None:
        """Compute each option by its definition, for whole prompts, chunks and single tokens."""
        for (name, options), (kind, step) in itertools.product(list(OPTIONS.items())[1:], STEPS.items()):
            for block_size in self.block_sizes[-2:]:
                self.check(
                    options, step, self._shape(block_size=block_size), f"{name}, {kind}, block size {block_size}"
                )

    def test_groups_of_heads(self) -> None:
        """Share key heads among query heads in groups of every size, one key head for all included."""
        for heads, kv_heads in ((1, 1), (4, 4), (4, 1), (6, 2), (6, 3)):
            shape = self._shape(heads=heads, kv_heads=kv_heads)
            self.check({}, STEPS["chunks"], shape, f"{heads} heads and {kv_heads} key heads")

    def test_sizes_of_heads(self) -> None:
        """Compute heads of each size that the backend supports."""
        for dim in self.head_dims:
            self.check({}, STEPS["chunks"], self._shape(dim=dim), f"heads of {dim}")

    def test_values_that_are_a_part_of_the_keys(self) -> None:
        """Compute latent attention, in a backend with that feature: one key head, and nothing but keys is written."""
        if "latent" not in self.plugin.features:
            does_not_apply("the backend has no latent attention")
        for dim, dtype in itertools.product(self.head_dims, self.dtypes):
            shape = self._shape(kv_heads=1, dim=dim, dtype=dtype, value_dim=dim - dim // 4)
            for name, step in STEPS.items():
                self.check({}, step, shape, f"latents of {shape.value_dim} in {dim}, {dtype}, {name}")

    def test_types(self) -> None:
        """Compute in each type as exactly as its width allows."""
        for dtype in self.dtypes:
            for options in ({}, {"window": 6}, {"soft_cap": 2.0}):
                self.check(options, STEPS["chunks"], self._shape(dtype=dtype), f"{dtype}, {options}")

    def test_long_rows(self) -> None:
        """Compute rows of hundreds of tokens beside short ones."""
        for options in ({}, {"window": 70}, {"soft_cap": 2.0}):
            self.check(options, LONG, self._shape(block_size=16), f"long rows, {options}")

    def test_a_row_is_as_it_is_alone(self) -> None:
        """Compute a row independently of its neighbours in the step, and of the blocks that it has."""
        shape = self._shape()
        together = self.compute({}, STEPS["chunks"], shape)
        start = 0
        for number, row in enumerate(STEPS["chunks"]):
            alone = self.compute({}, [row], shape, which=[number])
            error = (together[start : start + row[0]] - alone).abs().max()
            promise(bool(error < _same(shape)), f"row {number} of {row} differs by {error:.1e} from what it is alone")
            start += row[0]

    def test_keys_and_values_go_where_they_belong(self) -> None:
        """Read in later steps the keys and values that a step wrote: token by token, in chunks and whole give the same
        result.
        """
        shape = self._shape()
        whole = self.compute({}, [(21, 21)], shape)
        for size in (1, 4, 5):
            chunks = self.compute({}, [(21, 21)], shape, chunk=size)
            error = (whole - chunks).abs().max()
            promise(bool(error < _same(shape)), f"chunks of {size} differ by {error:.1e} from the whole")

    def test_rows_without_a_cache(self) -> None:
        """Compute bidirectional attention, in a backend with that feature: a token sees all of its row, and no other
        row.
        """
        if "bidirectional" not in self.plugin.features:
            does_not_apply("the backend has no bidirectional attention")
        lengths = (5, 1, 33, 1, 12)
        step = [(length, length) for length in lengths]
        start = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)
        for options, dtype in itertools.product(
            ({}, {"soft_cap": 2.0}, OPTIONS["alibi"], OPTIONS["sinks"]), self.dtypes
        ):
            shape = self._shape(dtype=dtype)
            world = _World(self.backend(), self, shape, {**options, "causal": False})
            rows = list(world.rows(step))
            q, k, v = (torch.cat(column) for column in zip(*rows, strict=True))
            got = world.backend.run_uncached(q, k, v, start, lengths, world.options).double().cpu()
            exact = [tuple(part.double().cpu() for part in row) for row in rows]
            wanted = torch.cat([attention(q, k, v, world.options) for q, k, v in exact])
            error = ((got - wanted).abs() / (1 + wanted.abs())).max()
            promise(bool(error <= 2 * _same(shape)), f"{dtype}, {options}: differs by {error:.1e} from the definition")

    def test_the_null_block_stays_zero(self) -> None:
        """Never write block 0."""
        backend, shape = self.backend(), self._shape()
        world = _World(backend, self, shape, {})
        world.compute(STEPS["chunks"])
        promise(not bool(world.cache[0].count_nonzero()), "block 0 was written")

    def test_refusal_is_an_answer(self) -> None:
        """Return a reason or None from `refuses` for every option, type and device, and never raise."""
        for (_, options), dtype, platform in itertools.product(
            OPTIONS.items(), ("float32", "float16", "bfloat16", "float64"), ("cpu", "cuda", "abacus")
        ):
            reason = self._refuses(options, replace(Shape(), dtype=dtype), platform)
            promise(reason is None or (isinstance(reason, str) and bool(reason)), f"refuses gives {shown(reason)}")

    # ------------------------------------------------------------------------------------ helpers

    def backend(self) -> AttentionBackend:
        backend: AttentionBackend = self.new()
        return backend

    def check(self, options: Mapping[str, Any], step: Step, shape: Shape, what: str) -> None:
        """Compare one step with the definition."""
        if self._refuses(options, shape, self.platform):
            return
        world = _World(self.backend(), self, shape, options)
        got = world.compute(step)
        wanted = torch.cat(
            [
                attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), world.options)
                for q, k, v in world.rows(step)
            ]
        )
        tolerance = 2 * _same(shape)
        promise(bool(got.isfinite().all()), f"{what}: numbers that are not finite; dead or foreign cells were read")
        error = ((got - wanted).abs() / (1 + wanted.abs())).max()
        promise(bool(error <= tolerance), f"{what}: differs by {error:.1e} from the definition, more than {tolerance}")

    def compute(
        self,
        options: Mapping[str, Any],
        step: Step,
        shape: Shape,
        which: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        return _World(self.backend(), self, shape, options).compute(step, which, chunk)

    def _shape(self, **changes: Any) -> Shape:
        """Return the smallest heads and largest blocks that the backend accepts, with `changes`, which it may
        refuse.
        """
        sizes = itertools.product(self.head_dims, reversed(self.block_sizes))
        shapes = [Shape(dim=dim, block_size=block_size, dtype=self.dtypes[0]) for dim, block_size in sizes]
        reasons = [self._refuses({}, shape, self.platform) for shape in shapes]
        if all(reasons) and self.platform != "cpu" and not torch.cuda.is_available():
            does_not_apply(f"there is no such device here: {reasons[0]}")
        if all(reasons) and "is not installed" in str(reasons[0]):
            does_not_apply(str(reasons[0]))
        promise(not all(reasons), f"plain attention is refused: {reasons[0]}")
        return replace(shapes[reasons.index(None)], **changes)

    def _refuses(self, options: Mapping[str, Any], shape: Shape, platform: str) -> str | None:
        caps = fake_caps(platform)
        spec, own = _spec(shape, options), _options(options, shape)
        reason: str | None = lacking_feature(self.plugin, spec, own)
        return reason or self.plugin.refuses(spec, own, caps, getattr(torch, shape.dtype))


class _World:
    """A cache full of NaN, and rows whose tokens follow from (row, position). Earlier steps write past tokens."""

    def __init__(self, backend: AttentionBackend, kit: AttentionKit, shape: Shape, options: Mapping[str, Any]) -> None:
        self.backend, self.shape = backend, shape
        self.device, self.dtype = torch.device(kit.device), getattr(torch, shape.dtype)
        self.options = _options(options, shape)
        spec = _spec(shape, options)
        cache = torch.full(backend.cache_shape(spec, _BLOCKS), float("nan"), dtype=self.dtype, device=self.device)
        promise(cache.shape[0] == _BLOCKS, f"cache_shape {tuple(cache.shape)} does not begin with the blocks")
        cache[0] = 0
        self.cache = cache

    def tokens(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v of a row's positions [start, stop)."""
        shape = self.shape
        draw = torch.Generator().manual_seed(1000 + row)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (torch.randn(512, count, shape.dim, generator=draw).to(self.dtype)[start:stop] for count in heads)
        if shape.value_dim:
            k = k.to(self.device)
            return q.to(self.device), k, k[..., : shape.value_dim]
        return q.to(self.device), k.to(self.device), v.to(self.device)

    def rows(self, step: Step) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for row, (count, length) in enumerate(step):
            _, k, v = self.tokens(row, 0, length)
            yield self.tokens(row, length - count, length)[0], k, v

    def compute(self, step: Step, which: Sequence[int] | None = None, chunk: int | None = None) -> torch.Tensor:
        """Return a step's result [tokens, heads, dim], float64 on the CPU. `which` are the rows' numbers; `chunk` cuts
        the step into chunks of this size.
        """
        names = list(range(len(step))) if which is None else list(which)
        table = _tables(step, self.shape.block_size)
        past = [length - count for count, length in step]
        if any(past):
            self.run([(n, n) for n in past], names, table)
        if chunk is None:
            return self.run(step, names, table)
        (count, length) = step[0]
        ends = [*range(length - count + chunk, length, chunk), length]
        starts = [length - count, *ends[:-1]]
        return torch.cat([self.run([(e - s, e)], names, table) for s, e in zip(starts, ends, strict=True)])

    def run(self, step: Step, names: Sequence[int], table: torch.Tensor) -> torch.Tensor:
        alive = [n for n, (count, _) in enumerate(step) if count]
        rows = [step[n] for n in alive]
        layout = _layout(
            rows, table[alive].clone(), self.shape.block_size, self.options.window or self.options.chunk, self.device
        )
        parts = [self.tokens(names[n], step[n][1] - step[n][0], step[n][1]) for n in alive]
        q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
        out = self.backend.run(q, k, v, self.cache, self.backend.plan(layout), self.options)
        wanted = (*q.shape[:2], v.shape[2])
        promise(tuple(out.shape) == wanted, f"run gives the shape {tuple(out.shape)}, not {wanted}")
        return out.double().cpu()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Compute one row by the definition: q [queries, heads, dim] belong to the last positions of k and v [keys,
    kv_heads, dim]; float64.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    at = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    distance = at - torch.arange(k.shape[0])
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.soft_cap:
        scores = (scores / options.soft_cap).tanh() * options.soft_cap
    if options.alibi_slopes:
        scores = scores - torch.tensor(options.alibi_slopes, dtype=q.dtype).view(-1, 1, 1) * distance.abs()
    unseen = (distance < 0) & options.causal
    if options.window:
        unseen = unseen | (distance >= options.window)
    if options.chunk:
        unseen = unseen | (distance > at % options.chunk)
    scores = scores.masked_fill(unseen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(q.dtype).cpu().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


def layout_of(step: Step, block_size: int, window: int = 0) -> AttentionLayout:
    """Return the layout of a step's tokens on the CPU, in blocks of their own from 2 on; dead entries name block 0 or
    1.
    """
    return _layout(step, _tables(step, block_size), block_size, window, torch.device("cpu"))


def alone(layout: AttentionLayout, row: int) -> tuple[slice, AttentionLayout]:
    """Return a row's slice of the tokens of a step on the CPU, and the layout of a step with this row only."""
    counts = layout.query_lens_host
    part = slice(sum(counts[:row]), sum(counts[: row + 1]))
    return part, replace(
        layout,
        query_start=torch.tensor([0, counts[row]], dtype=torch.int32),
        context_lens=layout.context_lens[row : row + 1],
        block_table=layout.block_table[row : row + 1],
        slot_mapping=layout.slot_mapping[part],
        query_lens_host=counts[row : row + 1],
        context_lens_host=layout.context_lens_host[row : row + 1],
    )


def _same(shape: Shape) -> float:
    """Return how far apart two results may be that differ only in the order of sums."""
    return {"float32": 1e-5, "float16": 2e-3}.get(shape.dtype, 1e-2)


def _spec(shape: Shape, options: Mapping[str, Any]) -> LayerCache:
    window = options.get("window", 0) or options.get("chunk", 0)
    group = CacheGroup("sliding" if window else "full", shape.block_size, window)
    return LayerCache(group, shape.kv_heads, shape.dim, value_dim=shape.value_dim)


def _options(options: Mapping[str, Any], shape: Shape) -> AttentionOptions:
    given = dict(options)
    if "sinks" in given:
        given["sinks"] = torch.tensor(given["sinks"], dtype=getattr(torch, shape.dtype))
    return AttentionOptions(scale=0.3 if shape.dim < 32 else shape.dim**-0.5, **given)


def _tables(step: Step, block_size: int) -> torch.Tensor:
    """Block tables in a shuffled order; block 0 is null, and block 1 belongs to no request and stays full of NaN."""
    counts = [-(-length // block_size) for _, length in step]
    order = iter((np.random.default_rng(0).permutation(sum(counts)) + 2).tolist())
    table = torch.zeros(len(step), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    return table


def _layout(step: Step, table: torch.Tensor, block_size: int, window: int, device: torch.device) -> AttentionLayout:
    slots: list[int] = []
    for row, (count, length) in enumerate(step):
        slots += [int(table[row, p // block_size]) * block_size + p % block_size for p in range(length - count, length)]
        if window:  # what lies behind the window of the row's first query is dead: any block may stand there
            dead = max(0, length - count - window + 1) // block_size
            table[row, :dead] = row % 2
    counts, lengths = tuple(count for count, _ in step), tuple(length for _, length in step)
    return AttentionLayout(
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots, device=device),
        block_size=block_size,
        max_query_len=max(counts),
        max_context_len=max(lengths),
        query_lens_host=counts,
        context_lens_host=lengths,
        window=window,
    )
