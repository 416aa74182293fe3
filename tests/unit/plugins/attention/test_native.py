"""The compiled attention kernel: definition, equal bits in any batch and cut, partitions, where it comes from."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ferrule.interfaces.attention import AttentionLayout
from ferrule.interfaces.model import AttentionOptions, LayerCache
from ferrule.types import CacheGroup
from ferrule_kernels.attention import narrowed
from ferrule_kernels.cpu import library
from ferrule_plugins.attention.cpu_native import CpuNativeAttention
from ferrule_testkit.caps import fake_caps
from ferrule_testkit.kits.attention import alone, layout_of
from ferrule_testkit.kits.attention import attention as definition
from tests.shared import grid

CPU = fake_caps()
PARTITION = 2048  # keys, of the kernel
SOURCE = Path(library.__file__).parent / "attention.cpp"
COMPUTED = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("installed", torch.float32), ("installed", torch.bfloat16), ("emulated tiles", torch.bfloat16)],
    indirect=["kernels"],
)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the installed library, or one whose tile registers are emulated."""
    if request.param != "installed":
        loaded = request.getfixturevalue("emulated_kernels")
        monkeypatch.setattr(library, "load", lambda: loaded)


@dataclass
class World:
    """One request's keys and values, in blocks of a shuffled cache that is full of NaN."""

    heads: int
    kv_heads: int
    dim: int
    length: int
    dtype: torch.dtype
    options: AttentionOptions
    block_size: int = 16
    cache_type: str = "auto"
    value_dim: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.length)
        blocks = -(-self.length // self.block_size)
        self.table = (torch.randperm(blocks) + 1).int().unsqueeze(0)
        self.attention = CpuNativeAttention()
        group = CacheGroup("sliding" if self.options.window else "full", self.block_size, self.options.window)
        spec = LayerCache(group, self.kv_heads, self.dim, value_dim=self.value_dim)
        shape = self.attention.cache_shape(spec, blocks + 1)
        self.stored = self.attention.cache_type(self.cache_type, self.dtype)
        self.cache = torch.full(shape, float("nan")).to(self.stored)
        self.cache[0] = 0
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        self.q, self.k, self.v = (torch.randn(self.length, n, self.dim).to(self.dtype) for n in sizes)
        if self.value_dim:
            self.v = self.k[..., : self.value_dim]

    def run(self, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        slots = self.table[0, positions // self.block_size].long() * self.block_size + positions % self.block_size
        layout = AttentionLayout(
            query_start=torch.tensor([0, stop - start], dtype=torch.int32),
            context_lens=torch.tensor([stop], dtype=torch.int32),
            block_table=self.table,
            slot_mapping=slots,
            block_size=self.block_size,
            max_query_len=stop - start,
            max_context_len=stop,
            query_lens_host=(stop - start,),
            context_lens_host=(stop,),
            window=self.options.window,
        )
        part = slice(start, stop)
        plan = self.attention.plan(layout)
        return self.attention.run(self.q[part], self.k[part], self.v[part], self.cache, plan, self.options)

    def expected(self, start: int, stop: int) -> torch.Tensor:
        k, v = (narrowed(x[:stop], self.stored).double() for x in (self.k, self.v))
        return definition(self.q[start:stop].double(), k, v, self.options)


def options(dim: int, **more: object) -> AttentionOptions:
    return AttentionOptions(scale=dim**-0.5, **more)  # type: ignore[arg-type]


@COMPUTED
@pytest.mark.usefixtures("kernels")
@grid(
    {
        "more": [{}, {"window": 37}],
        "heads,kv_heads,dim,block_size": [
            (16, 8, 128, 16),
            (4, 2, 64, 16),
            (6, 1, 80, 32),
            (8, 8, 32, 128),
            (2, 2, 256, 64),
            (40, 1, 16, 16),
        ],
    }
)
def test_shapes_equal_the_definition(
    heads: int, kv_heads: int, dim: int, block_size: int, more: dict[str, int], dtype: torch.dtype
) -> None:
    world = World(heads, kv_heads, dim, 203, dtype, options(dim, **more), block_size)
    exact = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
    for start, stop in ((0, 70), (70, 201), (201, 202), (202, 203)):
        torch.testing.assert_close(world.run(start, stop).double(), world.expected(start, stop), **exact)


@COMPUTED
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cache_type", ["auto", "fp8"])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 576, 512), (3, 80, 48), (70, 64, 64)])
def test_values_that_are_a_part_of_the_keys(
    heads: int, dim: int, value_dim: int, cache_type: str, dtype: torch.dtype
) -> None:
    world = World(heads, 1, dim, 140, dtype, options(dim), cache_type=cache_type, value_dim=value_dim)
    assert world.cache[0].numel() == 16 * dim
    exact = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
    pieces = [world.run(start, stop) for start, stop in ((0, 70), (70, 138), (138, 139), (139, 140))]
    torch.testing.assert_close(torch.cat(pieces).double(), world.expected(0, 140), **exact)
    whole = World(heads, 1, dim, 140, dtype, options(dim), cache_type=cache_type, value_dim=value_dim)
    assert torch.equal(whole.run(0, 140), torch.cat(pieces))


@COMPUTED
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [16, 50, 130])
def test_queries_see_their_own_chunk(chunk: int, dtype: torch.dtype) -> None:
    world = World(6, 2, 64, 203, dtype, options(64, chunk=chunk))
    exact = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
    for start, stop in ((0, 70), (70, 201), (201, 202), (202, 203)):
        torch.testing.assert_close(world.run(start, stop).double(), world.expected(start, stop), **exact)


@COMPUTED
@pytest.mark.usefixtures("kernels")
@grid(
    {
        "more": [{}, {"window": 37}, {"soft_cap": 5.0}, {"chunk": 40}],
        "heads,kv_heads,dim,block_size": [
            (8, 2, 64, 16),
            (2, 2, 48, 16),
            (4, 2, 32, 48),
            (6, 1, 80, 32),
            (3, 1, 128, 128),
        ],
    }
)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    heads: int, kv_heads: int, dim: int, block_size: int, more: dict[str, object], dtype: torch.dtype
) -> None:
    whole = World(heads, kv_heads, dim, 150, dtype, options(dim, **more), block_size)
    wanted = whole.run(0, 150)
    for size in (1, 7, 64):
        cut = World(heads, kv_heads, dim, 150, dtype, options(dim, **more), block_size)
        pieces = [cut.run(start, min(start + size, 150)) for start in range(0, 150, size)]
        assert torch.equal(torch.cat(pieces), wanted), size


@COMPUTED
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("more", [{}, {"window": 40}, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}])
def test_a_row_has_the_same_bits_in_any_batch(more: dict[str, object], dtype: torch.dtype) -> None:
    rows = [(1, 1), (1, 129), (20, 20), (1, 300), (33, 190), (3, 64), (1, 40), (140, 140)]
    scoring = options(32, **more)
    layout = layout_of(rows, 16, scoring.window)
    attention = CpuNativeAttention()
    torch.manual_seed(2)
    spec = LayerCache(CacheGroup("full", 16), 2, 32)
    cache = torch.randn(attention.cache_shape(spec, int(layout.block_table.max()) + 1)).to(dtype)
    cache[0] = 0
    total = sum(count for count, _ in rows)
    q, k, v = (torch.randn(total, heads, 32).to(dtype) for heads in (4, 2, 2))
    together = attention.run(q, k, v, cache, attention.plan(layout), scoring)
    for row, (count, length) in enumerate(rows):
        part, step = alone(layout, row)
        out = attention.run(q[part], k[part], v[part], cache, attention.plan(step), scoring)
        assert torch.equal(out, together[part]), (count, length)


@COMPUTED
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cache_type", ["fp8", "fp8_e5m2"])
def test_a_cache_of_eight_bits_is_what_it_was_rounded_to(cache_type: str, dtype: torch.dtype) -> None:
    """Equal the definition over rounded keys and values, with the same bits however the prompt is cut."""
    for more in ({}, {"window": 37}, {"soft_cap": 5.0}):
        world = World(6, 2, 80, 150, dtype, options(80, **more), cache_type=cache_type)
        whole = world.run(0, 150)
        exact = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
        torch.testing.assert_close(whole.double(), world.expected(0, 150), **exact)
        for size in (1, 47):
            cut = World(6, 2, 80, 150, dtype, options(80, **more), cache_type=cache_type)
            pieces = [cut.run(start, min(start + size, 150)) for start in range(0, 150, size)]
            assert torch.equal(torch.cat(pieces), whole), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_type", ["fp8_e4m3", "fp8_e5m2"])
def test_each_number_is_rounded_as_torch_does(cache_type: str, dtype: torch.dtype) -> None:
    """Let a token alone see its own value: all of bfloat16's numbers, and those half way between two of 8 bits."""
    values = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    stored = CpuNativeAttention.cache_type(cache_type, dtype)
    every = torch.arange(256).to(torch.uint8).view(stored).float()
    every = every[every.isfinite()].sort().values
    values = torch.cat((values.to(dtype), ((every[1:] + every[:-1]) / 2).to(dtype)))
    values = torch.nn.functional.pad(values, (0, -len(values) % 256)).view(-1, 1, 256)
    rows = len(values)
    attention = CpuNativeAttention()
    cache = torch.zeros(attention.cache_shape(LayerCache(CacheGroup("full", 16), 1, 256), rows + 1), dtype=stored)
    table = torch.arange(1, rows + 1, dtype=torch.int32).unsqueeze(1)
    layout = AttentionLayout(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.ones(rows, dtype=torch.int32),
        block_table=table,
        slot_mapping=table[:, 0].long() * 16,
        block_size=16,
        max_query_len=1,
        max_context_len=1,
        query_lens_host=(1,) * rows,
        context_lens_host=(1,) * rows,
    )
    nothing = torch.zeros_like(values)
    out = attention.run(nothing, nothing, values, cache, attention.plan(layout), options(256))
    wanted = narrowed(values, stored).to(dtype)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    assert float(out.nan_to_num().max()) == torch.finfo(stored).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_context_is_summed_over_partitions(dtype: torch.dtype) -> None:
    length = 2 * PARTITION + 300
    exact = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 1e-2}
    for more in ({}, {"sinks": torch.tensor([0.5, -1.0])}, {"window": PARTITION + 100}):
        world = World(2, 1, 16, length, dtype, options(16, **more))
        world.run(0, length - 1)
        expected = world.expected(length - 1, length)
        torch.testing.assert_close(world.run(length - 1, length).double(), expected, **exact)


@COMPUTED
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [40, 1])
def test_an_infinite_score_stays_in_its_row(size: int, dtype: torch.dtype) -> None:
    world = World(2, 2, 16, 40, dtype, options(16))
    world.k[3] = float("inf")
    out = torch.cat([world.run(start, start + size) for start in range(0, 40, size)])
    assert bool(out[:3].isfinite().all())
    assert not bool(out[5].isfinite().all())


@COMPUTED
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [40, 1])
def test_a_score_that_is_far_below_the_largest_has_no_weight(size: int, dtype: torch.dtype) -> None:
    """Give weights of exactly zero, which do not become the smallest numbers of their type."""
    world = World(2, 2, 16, 40, dtype, options(16))
    world.q[:], world.k[:], world.k[3] = 1.0, -20.0, 20.0
    expected = world.v[3].expand(37, 2, 16)
    out = torch.cat([world.run(start, start + size) for start in range(0, 40, size)])
    assert torch.equal(out[3:], expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"platform": "cuda"}, "CPUs only"),
        ({"dtype": torch.float16}, "not in float16"),
        ({"block_size": 8}, "--block-size must be a multiple of 16"),
        ({"dim": 72}, "head size must be a multiple of 16"),
    ],
)
def test_what_it_refuses(change: dict[str, object], said: str) -> None:
    spec = LayerCache(CacheGroup("full", int(change.get("block_size", 16))), 2, int(change.get("dim", 64)))  # type: ignore[call-overload]
    caps = fake_caps(str(change.get("platform", "cpu")))
    reason = CpuNativeAttention.refuses(spec, options(64), caps, change.get("dtype", torch.float32))  # type: ignore[arg-type]
    assert reason is not None
    assert said in reason


# ------------------------------------------------------------------------------------------- the library


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a home without built kernels, and none beside the package."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(library, "_installed", lambda *_: None)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_without_installed_kernels_they_are_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SOURCES", ("machine.cpp",))  # an installation compiles all of them
    monkeypatch.setattr(library, "features", frozenset)  # tile registers are tried by another file
    library.load()
    (built,) = (fresh / ".cache/ferrule/kernels").glob("*.so")
    left = built.with_name("build-killed")
    left.mkdir()
    library._compile("no compiler", (), built)  # another process waited meanwhile
    assert not left.exists()
    library.load.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("built twice"))
    assert library.load()._name == str(built)


def test_without_a_compiler_the_backend_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    reason = CpuNativeAttention.refuses(LayerCache(CacheGroup("full", 16), 1, 16), options(16), CPU, torch.float32)
    assert reason == "there is no C++ compiler to build the kernels with"


def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(compiler: str, *_: object) -> None:
        raise subprocess.CalledProcessError(1, compiler, stderr=b"attention.cpp:1: no such thing\nmore\n")

    monkeypatch.setattr(library, "_compile", fail)
    with pytest.raises(library.KernelsUnavailableError, match="do not compile: attention.cpp:1: no such thing"):
        library.load()


@pytest.mark.advisory("CVE-2025-69872")
def test_a_folder_that_others_may_write_to_is_not_trusted(fresh: Path) -> None:
    folder = fresh / ".cache/ferrule/kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(library.KernelsUnavailableError, match="may be written to by others"):
        library.load()


def test_a_file_that_is_no_library_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "_installed", lambda *_: broken)
    with pytest.raises(library.KernelsUnavailableError, match=r"broken\.so cannot be loaded"):
        library.load()
