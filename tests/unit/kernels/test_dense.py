"""Products with bfloat16 weights: the kernel beside float64, by this processor and by emulated tile registers."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ferrule_kernels.cpu import dense, library
from ferrule_kernels.cpu.dense import DenseMatrix
from tests import compiler

SHAPES = [(1, 1), (16, 32), (17, 7), (64, 64), (48, 96), (70, 100), (130, 333), (200, 2100)]
BATCHES = (1, 2, 5, 6, 7, 12, 13, 16, 17, 32, 33, 47, 70)
EMULATED = (1, 7, 16, 17, 33)  # a product there takes a hundred times as long
SOURCE = Path(library.__file__).parent / "dense.cpp"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


def _use(loaded: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(library, "load", lambda: loaded)
    dense._kernels.cache_clear()


@pytest.fixture(params=["installed", "emulated tiles"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, ...]]:
    """Use the installed library, then one with emulated tile registers; yield how many rows to multiply with it."""
    if request.param != "installed":
        _use(request.getfixturevalue("emulated_kernels"), monkeypatch)
    elif dense.unit() is None:
        pytest.skip("there are no compiled kernels here")
    yield BATCHES if request.param == "installed" else EMULATED
    monkeypatch.undo()
    dense._kernels.cache_clear()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compare within the rounding of float32 sums: each addition loses at most 2^-24 of the magnitudes summed up so
    far.
    """
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    most = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    assert ((y.double() - expected).abs() <= most * (weight.shape[1] + 2) * 2**-24 + 1e-30).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_equal_float64_but_for_the_rounding_of_sums(kernels: tuple[int, ...], n: int, k: int) -> None:
    weight, bias = _random(n, k, seed=1), _random(n, seed=2)
    for given in (None, bias):
        matrix = DenseMatrix(weight, given)
        for m in kernels:
            x = _random(m, k, seed=m)
            y = matrix.multiply(x, torch.float32)
            _close(y, x, weight, given)
            assert torch.equal(matrix.multiply(x), y.bfloat16())


@pytest.mark.usefixtures("kernels")
def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    matrix, x = DenseMatrix(_random(150, 2100)), _random(300, 2100, seed=3)
    whole = matrix.multiply(x, torch.float32)
    for first, last in ((0, 1), (1, 3), (3, 9), (9, 22), (22, 40), (148, 155), (100, 300)):
        assert torch.equal(matrix.multiply(x[first:last], torch.float32), whole[first:last])


@pytest.mark.usefixtures("kernels")
def test_threads_change_nothing() -> None:
    matrix, x, threads = DenseMatrix(_random(700, 512)), _random(20, 512, seed=4), torch.get_num_threads()
    try:
        made = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(matrix.multiply(x, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.usefixtures("kernels")
def test_nan_and_infinity_stay_in_their_rows() -> None:
    matrix, x = DenseMatrix(_random(40, 70)), _random(5, 70)
    clean = matrix.multiply(x)
    x[1, 3], x[3, 69] = torch.nan, torch.inf
    y = matrix.multiply(x)
    assert y[1].isnan().all()
    assert not y[3].isfinite().any()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_come_back_as_they_were(n: int, k: int, in_place: bool) -> None:
    weight = _random(n, k)
    matrix = DenseMatrix(weight.clone(), in_place=in_place)
    ids = torch.tensor([0, n - 1, n // 2, n // 3, 0])
    assert torch.equal(matrix.rows(ids), weight[ids])
    assert torch.equal(matrix.rows(ids[:0]), weight[:0])
    assert torch.equal(matrix.rows(torch.arange(n).int()), weight)
    for wrong in (n, -1):
        with pytest.raises(IndexError, match=str(wrong)):
            matrix.rows(torch.tensor([0, wrong]))


@pytest.mark.usefixtures("kernels")
def test_packing_takes_the_memory_of_the_weight_where_it_fits() -> None:
    for n, k, fits in ((48, 64, True), (64, 33, False), (65, 32, False)):
        weight = _random(n, k)
        kept = weight.clone()
        matrix = DenseMatrix(weight, in_place=True)
        assert torch.equal(weight, kept) is not fits
        assert torch.equal(matrix.rows(torch.arange(n)), kept)
        x = _random(3, k)
        assert torch.equal(matrix.multiply(x), DenseMatrix(kept).multiply(x))


@pytest.mark.usefixtures("kernels")
def test_other_types() -> None:
    matrix, x = DenseMatrix(_random(33, 40)), torch.randn(40, 6).t()
    assert torch.equal(matrix.multiply(x), matrix.multiply(x.bfloat16()))
    with pytest.raises(ValueError, match="float32"):
        DenseMatrix(torch.randn(3, 3))


def test_emulated_tiles_pass_the_check_that_real_ones_must(emulated_kernels: ctypes.CDLL) -> None:
    assert emulated_kernels.ferrule_dense_unit() == 3
    assert emulated_kernels.ferrule_check_tiles() == 0


def test_tiles_that_multiply_wrong_fail_it(tmp_path: Path) -> None:
    """Use a configuration of which only a part was read, as a compiler may leave it."""
    header = SOURCE.with_name("tiles.h").read_text()
    broken = header.replace("first, next, 16, 16}", "first, next, 16, 8}")
    assert broken != header
    for name in ("dense.cpp", *library.HEADERS):
        shutil.copy(SOURCE.with_name(name), tmp_path)
    (tmp_path / "tiles.h").write_text(broken)
    target = compiler.shared_library(tmp_path / "dense.cpp", flags=["-DFERRULE_EMULATE_TILES"])
    assert ctypes.CDLL(str(target)).ferrule_check_tiles() == 1


def test_the_variant_with_tiles_compiles() -> None:
    flags = "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"
    if "amx_tile" in library.features():
        assert ctypes.CDLL(str(compiler.shared_library(SOURCE, flags=flags))).ferrule_dense_unit() == 3
    else:  # it cannot run: nothing of it is called
        compiler.object_file(SOURCE, *flags)


class _Tiles:
    """A library whose tile registers answer as they are told."""

    def __init__(self, use: int, check: int) -> None:
        self.ferrule_use_tiles = lambda: use
        self.ferrule_check_tiles = lambda: check


@pytest.mark.parametrize(("use", "check", "taken"), [(0, 0, True), (-1, 0, False), (0, 1, False)])
def test_tiles_that_are_refused_or_wrong_are_not_used(
    use: int, check: int, taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = frozenset({"avx2", "amx_tile", "amx_bf16", "amx_int8"})
    monkeypatch.setattr(library, "features", lambda: here)
    monkeypatch.setattr(library, "_open", lambda found: _Tiles(use, check) if "amx_tile" in found else "vectors")
    loaded = library.load.__wrapped__()
    assert (loaded != "vectors") is taken
    assert ("AMX" in caplog.text) is not taken


@pytest.mark.slow
@pytest.mark.parametrize(("march", "unit"), [("x86-64", 0), ("x86-64-v3", 1), ("x86-64-v4", 1)])
def test_each_generation_of_processors(march: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not {"avx512f", "avx2"} <= library.features():
        pytest.skip("this processor does not run them all")
    loaded = ctypes.CDLL(str(compiler.shared_library(SOURCE, flags=[f"-march={march}"])))
    assert loaded.ferrule_dense_unit() == unit
    _use(loaded, monkeypatch)
    try:
        for (n, k), m in itertools.product(SHAPES, BATCHES):
            weight, x = _random(n, k, seed=1), _random(m, k, seed=m)
            y = DenseMatrix(weight).multiply(x, torch.float32)
            _close(y, x, weight, None)
            assert torch.equal(DenseMatrix(weight).multiply(x[-1:], torch.float32), y[-1:])
    finally:
        monkeypatch.undo()
        dense._kernels.cache_clear()
