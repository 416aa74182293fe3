"""Products with weights that are looked up: the compiled kernel beside torch's definition."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ferrule_kernels import tables as reference
from ferrule_kernels.cpu import library, tables
from ferrule_kernels.cpu.tables import MergedTables, TableMatrix
from ferrule_kernels.tables import Additive, AdditiveForm, Palette
from tests import compiler
from tests.unit.kernels.test_matmul import compiled

SHAPES = [(1, 32), (4, 64), (70, 160), (33, 320), (18, 1312)]
BOOKS = [(1, 8, 8), (1, 10, 8), (1, 16, 8), (2, 8, 8), (3, 5, 16), (1, 12, 16)]  # how many, bits, inputs of a group
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # how far: weights are rounded to them


def palette(n: int, k: int, bits: int) -> Palette:
    draw = torch.Generator().manual_seed(n * 1000 + k)
    codes = torch.randint(0, 1 << bits, (n, k), generator=draw).to(torch.uint8)
    return Palette(codes, torch.randn((n, 1 << bits), generator=draw), bits)


def additive(n: int, k: int, count: int, bits: int, group: int) -> Additive:
    draw = torch.Generator().manual_seed(n * 1000 + k)
    codes = torch.randint(0, 1 << bits, (n, k // group, count), generator=draw)
    books = torch.randn((count, 1 << bits, group), generator=draw)
    kind = torch.uint8 if bits <= 8 else torch.int16
    return Additive(codes.to(kind), books, torch.rand(n, generator=draw) + 0.5)


def weights() -> Iterator[Palette | Additive]:
    for n, k in SHAPES:
        yield from (palette(n, k - 8 * (bits == 4), bits) for bits in reference.PALETTE_BITS)
        yield from (additive(n, k - k % group, count, bits, group) for count, bits, group in BOOKS)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_definition(dtype: torch.dtype) -> None:
    """Multiply by the definition, with the same bits of a row alone and in any batch."""
    for weight in weights():
        n, k = weight.shape
        bias, x = torch.randn(n), torch.randn(40, k).to(dtype)
        matrix = TableMatrix(weight, dtype, bias)
        whole, expected = matrix.multiply(x, torch.float32), reference.multiply(x, weight, bias)
        assert float((whole - expected).norm() / expected.norm()) < DTYPES[dtype], weight.shape
        assert matrix.multiply(x).dtype == dtype
        for first, last in ((0, 1), (1, 3), (3, 9), (2, 9), (5, 40)):
            assert torch.equal(matrix.multiply(x[first:last], torch.float32), whole[first:last])


@compiled
def test_many_rows_are_cut_into_chunks_and_threads_change_nothing() -> None:
    weight = palette(300, 512, 4)
    matrix, x = TableMatrix(weight, torch.bfloat16), torch.randn(500, 512).bfloat16()
    made, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(matrix.multiply(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    for row in (0, 191, 192, 499):
        assert torch.equal(matrix.multiply(x[row : row + 1])[0], made[0][row])


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_projections_follow_each_other(dtype: torch.dtype) -> None:
    parts = [additive(n, 64, 2, 8, 8) for n in (16, 3, 20)]
    bias, x = torch.randn(39), torch.randn(5, 64).to(dtype)
    merged = MergedTables(parts, dtype, bias)
    alone = [TableMatrix(part, dtype, own) for part, own in zip(parts, bias.split([16, 3, 20]), strict=True)]
    assert torch.equal(merged.multiply(x), torch.cat([each.multiply(x) for each in alone], 1))
    assert sum(each.nbytes for each in merged.tensors()) == sum(each.nbytes for each in alone)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_form(dtype: torch.dtype) -> None:
    for bits, most in ((3, 3.4), (4, 4.2)):
        packed = TableMatrix(palette(64, 4096, bits), dtype)
        assert packed.nbytes == tables.palette_form(bits, dtype).packed_bytes(64, 4096) < 64 * 4096 * most / 8
    for count, bits, group in BOOKS:
        form = AdditiveForm(count, bits, group, tables.unit(dtype).itemsize)
        assert TableMatrix(additive(64, 512, count, bits, group), dtype).nbytes == form.packed_bytes(64, 512)


@compiled
def test_numbers_that_are_not_finite_stay_in_their_rows() -> None:
    for weight in (palette(20, 96, 3), palette(20, 96, 4), additive(20, 96, 2, 8, 8)):
        x = torch.randn(9, 96)
        x[1], x[2, 5], x[3, 5] = 0, torch.nan, torch.inf
        y = TableMatrix(weight, torch.float32).multiply(x)
        assert y[2].isnan().all()
        assert not y[3].isfinite().any()
        assert not y[1].any()
        assert y[[0, *range(4, 9)]].isfinite().all()


def test_what_no_kernel_multiplies() -> None:
    weight = additive(8, 64, 1, 10, 8)
    wide = Additive(weight.codes, torch.zeros(1, 1024, 24))
    for given, said in (
        (wide, "8 or 16 inputs, not 24"),
        (replace(weight, codes=weight.codes.long()), "uint8 or int16"),
        (replace(weight, books=weight.books[:, :9]), "one of 9 entries"),
    ):
        assert said in (given.problem or "")
    assert weight.problem is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_each_generation_of_processors(march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each generation that this processor can run: each adds lanes up in an order of its own."""
    if march == "x86-64-v4" and "avx512bw" not in library.features():
        pytest.skip("this processor has no AVX-512")
    target = compiler.shared_library(Path(library.__file__).with_name("tables.cpp"), flags=[f"-march={march}"])
    monkeypatch.setattr(library, "load", lambda: ctypes.CDLL(str(target)))
    monkeypatch.setattr(tables, "_kernels", tables._kernels.__wrapped__)
    for dtype in DTYPES:
        assert tables.unit(dtype) == torch.float32
        test_products_are_those_of_the_definition(dtype)
    test_memory_is_that_of_the_form(torch.float32)
    test_numbers_that_are_not_finite_stay_in_their_rows()
