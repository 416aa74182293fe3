"""Products with quantized weights: the compiled kernel and torch's definition beside float64."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_kernels import matmul as reference
from ferrule_kernels.cpu import library, matmul
from ferrule_kernels.cpu.bank import Abreast
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form, Levels
from tests import compiler

FORMS = [Form(8), Form(8, digits=2), Form(8, 64), Form(4, 32), Form(4, 32, digits=2), Form(4, 64), Form(4, 128)]
FORMS += [Form(6, 16), Form(6, 64, digits=2), Form(5, 32), Form(5), Form(3, 32), Form(3, 96), Form(2, 16), Form(2, 64)]
SHAPES = [(1, 1), (16, 8), (17, 7), (64, 32), (48, 96), (70, 100), (130, 333), (200, 257)]
BATCHES = (1, 2, 3, 4, 5, 6, 7, 12, 13, 33, 70)
SOURCES = [Path(library.__file__).parent / name for name in ("matmul.cpp", "matmul_pack.cpp", "blocks.cpp")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


compiled = pytest.mark.skipif(not library.available(), reason="there are no compiled kernels here")


CASES = [(form, *shape) for form, shape in itertools.product(FORMS, SHAPES)]


def _made(form: Form, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight that the form holds exactly, and a bias. Each group's largest number sets its scale."""
    draw = torch.Generator().manual_seed(n * 1000 + k)
    group, padded = form.widths(k)
    top = (1 << (form.bits - 1)) - 1
    numbers = torch.randint(-top, top + 1, (n, padded // group, group), generator=draw).float()
    numbers[:, :, 0] = 127 if form.bits == 8 else -top - 1
    scales = torch.randint(64, 128, (n, padded // group, 1), generator=draw) / 2**11
    weight = (numbers * scales).flatten(1)[:, :k]
    return weight, torch.randn(n, generator=draw)


def _multiplied(x: torch.Tensor, weight: torch.Tensor, form: Form, bias: torch.Tensor) -> list[torch.Tensor]:
    made = [reference.multiply(x, reference.quantize(weight, form), form, bias)]
    if library.available():
        made.append(PackedMatrix(weight, form, bias, Workspace()).multiply(x, torch.float32))
    return made


@pytest.mark.parametrize(("form", "n", "k"), CASES)
def test_products_equal_float64_but_for_the_rounding_of_activations(form: Form, n: int, k: int) -> None:
    """Differ by half a step of the activations' scale in each input at most, times the weights' magnitudes."""
    weight, bias = _made(form, n, k)
    group, padded = form.widths(k)
    reach = 127 if form.digits == 1 else 127 * 256
    for m in BATCHES:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        expected = x.double() @ weight.double().t() + bias.double()
        steps = torch.nn.functional.pad(x, (0, padded - k)).view(m, -1, group).abs().amax(2) / reach  # [m, groups]
        sums = torch.nn.functional.pad(weight, (0, padded - k)).view(n, -1, group).abs().sum(2)  # [n, groups]
        bound = 0.5001 * steps.double() @ sums.double().t() + 1e-4
        for y in _multiplied(x, weight, form, bias):
            assert y.shape == (m, n)
            assert ((y.double() - expected).abs() <= bound).all()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_equals_the_definition(form: Form, dtype: torch.dtype) -> None:
    for n, k in ((70, 100), (64, 256)):
        draw = torch.Generator().manual_seed(n)
        weight = (torch.randn(n, k, generator=draw) * 0.05).to(dtype)
        quantized = reference.quantize(weight, form)
        packed = PackedMatrix(weight, form, None, Workspace())
        for m in (1, 9):
            x = torch.randn(m, k, generator=draw).to(dtype)
            expected = reference.multiply(x, quantized, form)
            apart = (packed.multiply(x, torch.float32) - expected).abs() / expected.abs().max()
            assert (apart > 2e-3).float().mean() < 0.001
            assert packed.multiply(x).dtype == dtype
            torch.testing.assert_close(
                packed.multiply(x).float(), packed.multiply(x, torch.float32), rtol=8e-3, atol=1e-3
            )


@compiled
@pytest.mark.parametrize("form", [*(Form(bits, 32, 2) for bits in (2, 3, 4, 5, 6, 8)), Form(4, 256, 2), Form(4, 32)])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_products_fit(form: Form, sign: int) -> None:
    """Multiply the highest weights by activations whose lower digit is -128: few such products fit 16 bits together."""
    numbers = torch.full((16, 256), (1 << (form.bits - 1)) - 1, dtype=torch.int8)
    scales = torch.ones(16, 256 // form.group)
    x = torch.full((6, 256), sign * (127.0 * 256 - 128))
    x[:, :: form.group] = sign * 127.0 * 256
    y = PackedMatrix(numbers, form, None, Workspace(), scales).multiply(x)
    weight = reference.Quantized(numbers.view(16, -1, form.group), scales)
    torch.testing.assert_close(y, reference.multiply(x, weight, form), rtol=1e-6, atol=0)


@compiled
@pytest.mark.parametrize("form", [Form(8), Form(4, 32)])
def test_groups_of_nothing_but_tiny_weights_are_zeros(form: Form) -> None:
    """Encode such groups as zeros: a scale that is not a normal number could make them NaN."""
    weight = torch.full((16, 64), 1e-39)
    weight[:, 32:] = -1e-31
    assert not reference.quantize(weight, form).weights(64).any()
    assert not PackedMatrix(weight, form, None, Workspace()).multiply(torch.ones(2, 64)).any()


@compiled
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -2e36])
@pytest.mark.parametrize("form", [Form(8), Form(6, 16), Form(4, 32)], ids=str)
def test_weights_that_no_scale_fits_are_refused(form: Form, value: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for place in ((0, 0), (70, 45)):  # the last is in a part of a vector, and of a panel
            weight = torch.randn(71, 46).to(dtype)
            PackedMatrix(weight, form, None, Workspace())
            weight[place] = value
            with pytest.raises(ValueError, match="not a finite number, or too large"):
                PackedMatrix(weight, form, None, Workspace())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: Form, dtype: torch.dtype) -> None:
    weight = (torch.randn(150, 130) * 0.05).to(dtype)
    packed = PackedMatrix(weight, form, torch.randn(150), Workspace())
    x = torch.randn(280, 130).to(dtype)
    whole = packed.multiply(x)
    for first, last in ((0, 1), (1, 3), (3, 9), (9, 22), (138, 145), (100, 280)):
        assert torch.equal(packed.multiply(x[first:last]), whole[first:last])


OFFSETS = [Form(4, 32), Form(4, 16), Form(8, 32), Form(8, 64), Form(4, 32, 2), Form(8, 64, 2)]
OFFSETS += [Form(6, 16), Form(5, 32), Form(3, 32, 2), Form(2, 16)]
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)


@compiled
@pytest.mark.parametrize("plain", OFFSETS)
@pytest.mark.parametrize("k", [256, 120])
def test_offsets_are_added_to_the_weights_of_a_group(plain: Form, k: int) -> None:
    """Compute as the definition, and as float64: for one row and for the many that tile registers process."""
    form, draw, n = replace(plain, offsets=True), torch.Generator().manual_seed(k), 70
    group, padded = form.widths(k)
    half = 2 ** (form.bits - 1)
    numbers = torch.randint(1 - half, half, (n, padded), generator=draw).to(torch.int8)
    numbers[:, k:] = 0
    scales, offsets = (torch.randn(n, padded // group, generator=draw).bfloat16().float() for _ in range(2))
    packed = PackedMatrix(numbers[:, :k], form, None, Workspace(), scales, offsets)
    assert packed.nbytes == form.packed_bytes(n, k)
    weight = reference.Quantized(numbers.view(n, -1, group), scales, offsets)
    x = torch.randn(40, k, generator=draw)
    whole = packed.multiply(x)
    torch.testing.assert_close(
        whole, reference.multiply(x, weight, form), rtol=1e-3, atol=5e-3 * float(whole.abs().max())
    )
    expected = x.double() @ weight.weights(k).double().t()
    assert float((whole - expected).abs().max() / expected.abs().max()) < (0.02 if form.digits == 1 else 1e-4)
    for first, last in ((0, 1), (1, 3), (3, 9), (5, 40)):
        assert torch.equal(packed.multiply(x[first:last]), whole[first:last])


@compiled
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("k", [256, 120])
def test_codes_stand_for_the_numbers_of_their_table(digits: int, offsets: bool, k: int) -> None:
    """Give with codes of 4 bits the bits that the numbers give as 8 bits, alone and among others."""
    form, draw, n = Form(4, 32, digits, offsets, TABLE), torch.Generator().manual_seed(k), 70
    codes = torch.randint(0, 16, (n, k), generator=draw).to(torch.int8)
    scales = torch.randn(n, -(-k // 32), generator=draw).bfloat16().float()
    added = torch.randn(scales.shape, generator=draw).bfloat16().float() if offsets else None
    packed = PackedMatrix(codes, form, None, Workspace(), scales, added)
    assert packed.nbytes == form.packed_bytes(n, k) == replace(form, table=()).packed_bytes(n, k)
    numbers = torch.tensor(TABLE, dtype=torch.int8)[codes.int()]
    whole = PackedMatrix(numbers, Form(8, 32, digits, offsets), None, Workspace(), scales, added)
    for rows in (1, 3, 20):
        x = torch.randn(rows, k, generator=draw)
        assert torch.equal(packed.multiply(x), whole.multiply(x))


LEVELS = [Form(4, 32, offsets=True, halves=True, block=256, steps=8), Form(6, 16, halves=True, block=256, steps=8)]
LEVELS += [Form(3, 16, halves=True, block=256, steps=8), Form(2, 16, 2, True, halves=True, block=128, steps=4)]
LEVELS += [Form(5, 32, offsets=True, block=128, steps=4), Form(4, 32, table=TABLE, halves=True, block=256, steps=8)]
LEVELS += [Form(4, 32, offsets=True, halves=True), Form(8, 32, 2, halves=True), Form(3, 32, halves=True)]


def _levelled(form: Form, n: int, k: int) -> tuple[torch.Tensor, Levels, Levels | None]:
    """Return numbers or codes [n, k] from end to end of their range, and scales and offsets of one level or two."""
    draw = torch.Generator().manual_seed(k)
    group, padded = form.widths(k)
    numbers = torch.randint(form.lowest, form.lowest + (1 << form.bits) - (form.bits == 8), (n, k), generator=draw)

    def levels(scale: float) -> Levels:
        blocks = n, padded // (form.block or group)
        floats = torch.randn(blocks, generator=draw).mul(scale).to(torch.float16 if form.halves else torch.bfloat16)
        ends = (0, 16) if form.steps == 4 else (-127, 128)
        steps = torch.randint(*ends, (n, padded // group), generator=draw).to(torch.int8) if form.steps else None
        return Levels(floats.float(), steps)

    return numbers.to(torch.int8), levels(1e-3), levels(1e-2) if form.offsets else None


@compiled
@pytest.mark.parametrize("form", LEVELS)
@pytest.mark.parametrize(("n", "k"), [(70, 768), (48, 600)])
def test_groups_multiply_the_scales_of_their_block(form: Form, n: int, k: int) -> None:
    """Use exactly the weights of numbers, steps and float16: float64 differs by what sums of float32 lose."""
    numbers, scales, offsets = _levelled(form, n, k)
    packed = PackedMatrix(numbers, form, None, Workspace(), scales, offsets)
    assert packed.nbytes == form.packed_bytes(n, k)
    group, padded = form.widths(k)
    cells = torch.nn.functional.pad(reference_numbers(form, numbers), (0, padded - k)).view(n, -1, group)
    weight = reference.Quantized(cells, scales.spread(), None if offsets is None else offsets.spread())
    x = torch.randn(30, k, generator=torch.Generator().manual_seed(n))
    x[:, ::3] = 127 * (256 if form.digits == 2 else 1)  # activations that are rounded to themselves
    x[:, 1::3] = torch.randint(-127, 128, x[:, 1::3].shape).float()
    x[:, 2::3] = 0
    whole = packed.multiply(x)
    expected = x.double() @ weight.weights(k).double().t()
    assert float((whole - expected).abs().max() / expected.abs().max()) < 1e-5
    torch.testing.assert_close(
        whole, reference.multiply(x, weight, form), rtol=1e-5, atol=1e-5 * float(whole.abs().max())
    )
    for first, last in ((0, 1), (1, 3), (3, 9), (9, 14), (14, 21), (5, 30)):
        assert torch.equal(packed.multiply(x[first:last]), whole[first:last])


@compiled
@pytest.mark.parametrize("form", LEVELS)
def test_rows_are_what_numbers_and_scales_stand_for(form: Form) -> None:
    n, k = 70, 600
    numbers, scales, offsets = _levelled(form, n, k)
    packed = PackedMatrix(numbers, form, None, Workspace(), scales, offsets)
    group, padded = form.widths(k)
    cells = torch.nn.functional.pad(reference_numbers(form, numbers), (0, padded - k)).view(n, -1, group)
    weight = reference.Quantized(cells, scales.spread(), None if offsets is None else offsets.spread()).weights(k)
    ids = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    for few in (ids[:1], ids):
        for dtype in DTYPES:
            torch.testing.assert_close(packed.rows(few, dtype), weight[few].to(dtype), rtol=1e-6, atol=1e-9)
    for wrong in (n, -1):
        with pytest.raises(IndexError, match=f"row {wrong} does not exist: the matrix has {n} rows"):
            packed.rows(torch.tensor([0, wrong]), torch.float32)


@compiled
def test_rows_have_the_factor_of_their_channel() -> None:
    numbers, scales = torch.randint(-127, 128, (20, 64), dtype=torch.int8), torch.rand(20, 1) + 0.1
    packed = PackedMatrix(numbers, Form(8), None, Workspace(), scales)
    assert packed.factors is not None
    torch.testing.assert_close(packed.rows(torch.arange(20), torch.float32), numbers * scales, rtol=1e-6, atol=0)


@compiled
@pytest.mark.parametrize("form", [*LEVELS, Form(8), Form(8, 64), Form(4, 32), Form(5, 32), Form(3, 96), Form(2, 16)])
@pytest.mark.parametrize(("n", "k"), [(70, 768), (33, 600), (5, 130)])
def test_numbers_as_bytes_are_packed_as_floats_are(form: Form, n: int, k: int) -> None:
    _, scales, offsets = _levelled(form, n, k)
    numbers = torch.randint(-128, 128, (n, k), dtype=torch.int8)  # beyond the form's, too
    given = scales if form.steps else scales.floats, offsets if offsets is None or form.steps else offsets.floats
    packed = [PackedMatrix(each, form, None, Workspace(), *given) for each in (numbers, numbers.bfloat16())]
    assert torch.equal(packed[0].packed, packed[1].packed)


@compiled
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "block"),
    [(130, 200, None), (64, 256, (128, 128)), (200, 384, (128, 128)), (100, 130, (7, 40)), (70, 96, (1, 32))]
    + [(33, 64, (64, 48))],
)
def test_fp8_is_quantized_as_its_floats_are(
    n: int, k: int, block: tuple[int, int] | None, dtype: torch.dtype, digits: int
) -> None:
    weight, form = (torch.randn(n, k) * 50).to(torch.float8_e4m3fn), Form(8, 32, digits)
    tall, step = block or (1, k)
    scales = torch.rand(-(-n // tall), -(-k // step)) * 1e-2
    spread = scales.repeat_interleave(tall, 0)[:n].repeat_interleave(step, 1)[:, :k]
    floats = (weight.float() * spread).to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    wanted, packed = PackedMatrix(floats, form, None, Workspace()), PackedMatrix.empty(n, k, form, Workspace())
    packed.put_fp8(weight, scales if block else scales[:, 0], block, dtype)
    assert torch.equal(packed.packed, wanted.packed)


@compiled
def test_fp8_that_does_not_fit_is_refused() -> None:
    weight, packed = torch.zeros(3, 64).to(torch.float8_e4m3fn), PackedMatrix.empty(3, 64, Form(8, 32), Workspace())
    for shape, block in (((4,), None), ((2,), None), ((3, 2), None), ((1, 1), (2, 64)), ((3, 2), (1, 64))):
        with pytest.raises(ValueError, match="is not such a weight"):
            packed.put_fp8(weight, torch.ones(shape), block, torch.bfloat16)
    for scale in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="not a finite number"):
            packed.put_fp8(torch.ones(3, 64).to(torch.float8_e4m3fn), torch.tensor([1, scale, 1]), None, torch.float32)
    for byte in (0x7F, 0xFF):
        weight.view(torch.uint8)[2, 63] = byte
        with pytest.raises(ValueError, match="not a finite number"):
            packed.put_fp8(weight, torch.ones(3), None, torch.bfloat16)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_side_by_side_are_those_of_each_matrix(dtype: torch.dtype) -> None:
    made, workspace, k = [], Workspace(), 768
    for form, n in ((LEVELS[0], 70), (LEVELS[0], 64), (LEVELS[1], 33), (Form(8, 0, 2), 5)):
        if form.steps:
            made.append(
                PackedMatrix(*_levelled(form, n, k)[:1], form, torch.randn(n), workspace, *_levelled(form, n, k)[1:])
            )
        else:
            made.append(PackedMatrix(torch.randn(n, k), form, None, workspace))
    for rows in (1, 2, 19):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(Abreast(made).multiply(x), torch.cat([matrix.multiply(x) for matrix in made], 1))


def reference_numbers(form: Form, numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers that codes encode; the numbers themselves without a table."""
    return torch.tensor(form.table, dtype=torch.int8)[numbers.int()] if form.table else numbers


@compiled
def test_denormal_halves_are_kept() -> None:
    floats = torch.tensor([[2.0**-24], [-(2.0**-15)], [0.0], [65504.0]])
    form = Form(8, 32, halves=True)
    packed = PackedMatrix(torch.full((4, 32), 127, dtype=torch.int8), form, None, Workspace(), floats)
    assert torch.equal(packed.multiply(torch.full((1, 32), 127.0)), floats.t() * (127 * 127 * 32))


@pytest.mark.parametrize(
    "form",
    [Form(4, 32, block=100, steps=8), Form(4, 32, block=256), Form(4, 32, steps=8), Form(4, 0, block=256, steps=8)]
    + [Form(4, 32, block=256, steps=4), Form(4, 32, offsets=True, block=256, steps=6), Form(3, 16, block=16, steps=8)],
)
def test_blocks_that_no_kernel_has(form: Form) -> None:
    assert form.problem is not None


@pytest.mark.parametrize(
    "form",
    [Form(7), Form(4, 12), Form(6, 8), Form(5, 16), Form(3, 16), Form(8, 32, table=TABLE), Form(4, 32, table=(1, 2))],
)
def test_forms_that_no_kernel_has(form: Form) -> None:
    with pytest.raises(ValueError, match="bits|table"):
        PackedMatrix(torch.zeros(16, 64, dtype=torch.int8), form, None, Workspace(), torch.ones(16, 64))


def test_offsets_come_with_a_form_that_has_them() -> None:
    numbers, scales = torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1)
    for form, offsets in ((Form(8, 32), scales), (Form(8, 32, offsets=True), None)):
        with pytest.raises(ValueError, match="offsets"):
            PackedMatrix(numbers, form, None, Workspace(), scales, offsets)


@compiled
@pytest.mark.parametrize("form", [Form(8), Form(4, 32), Form(6, 16), Form(4, 32, 2)])
@pytest.mark.parametrize("counts", [(1, 2, 3), (16, 15), (17, 17, 17), (33, 1, 65), (17,) * 40])
def test_memory_for_several_products_holds_the_rows_of_each(form: Form, counts: tuple[int, ...]) -> None:
    packed = PackedMatrix(torch.randn(48, 256), form, None, Workspace())
    packed.memory(sum(counts), len(counts))
    needed = sum(packed._memory(packed._address, count, 1) for count in counts)
    assert packed._workspace._memory.numel() >= needed


@compiled
def test_threads_change_nothing() -> None:
    packed = PackedMatrix(torch.randn(300, 512), Form(4, 32), None, Workspace())
    x, threads = torch.randn(20, 512), torch.get_num_threads()
    try:
        made = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(packed.multiply(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize("form", FORMS)
def test_zeros_nan_and_infinity(form: Form) -> None:
    weight = torch.randn(20, 96)
    weight[3] = 0
    x = torch.randn(6, 96)
    x[1], x[2, 5], x[3, 5], x[4] = 0, torch.nan, torch.inf, 1e-35
    for y in _multiplied(x, weight, form, torch.zeros(20)):
        assert y[2].isnan().all()
        assert not y[3].isfinite().any()
        assert not y[[1, 4]].any()
        assert y[[0, 5]].isfinite().all()
        assert not y[0, 3]


@compiled
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exact", [True, False])
def test_numbers_and_scales_that_are_given_are_kept(form: Form, exact: bool) -> None:
    """Keep also channels whose numbers do not fill the range; scales that bfloat16 cannot hold are rounded."""
    draw = torch.Generator().manual_seed(5)
    group, padded = form.widths(100)
    top = 90 if form.bits == 8 else (1 << (form.bits - 1)) - 1
    numbers = torch.randint(-top, top + 1, (70, 100), generator=draw)
    scales = torch.rand(70, padded // group, generator=draw) * 0.01 + 0.001
    scales = scales.bfloat16().float() if exact else scales
    bias, x = torch.randn(70, generator=draw), torch.randn(5, 100, generator=draw)
    packed = PackedMatrix(numbers.to(torch.int8), form, bias, Workspace(), scales)
    kept = scales if exact or scales.shape[1] == 1 else scales.bfloat16().float()
    cells = torch.nn.functional.pad(numbers, (0, padded - 100)).view(70, -1, group).to(torch.int8)
    expected = reference.multiply(x, reference.Quantized(cells, kept), form, bias)
    torch.testing.assert_close(packed.multiply(x), expected, rtol=1e-3, atol=2e-3)


@compiled
def test_a_result_is_its_own() -> None:
    packed = PackedMatrix(torch.randn(40, 64), Form(8), None, Workspace())
    x = torch.randn(64, 5).t()  # not contiguous
    y = packed.multiply(x)
    kept = y.clone()
    packed.multiply(torch.randn(90, 64))
    assert torch.equal(y, kept)
    assert torch.equal(packed.multiply(x.contiguous()), kept)


@compiled
@compiled
@pytest.mark.parametrize("form", [Form(8), Form(4, 32, offsets=True), Form(6, 16)])
def test_some_outputs_at_a_time_are_packed_as_all_are(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, (n, k) = torch.Generator().manual_seed(5), (600, 96)
    numbers = torch.randint(-8, 8, (n, k), generator=draw).to(torch.int8)
    sizes = n, form.widths(k)[1] // form.widths(k)[0]
    scales = torch.rand(*sizes, generator=draw)
    offsets = torch.rand(*sizes, generator=draw) if form.offsets else None
    packed = [
        PackedMatrix(each, form, None, Workspace(), scales, offsets).packed for each in (numbers, numbers.float())
    ]
    monkeypatch.setattr(matmul, "_CONVERTED", 1)  # 256 outputs
    packed.append(PackedMatrix(numbers, form, None, Workspace(), scales, offsets).packed)
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])


def test_memory_is_that_of_the_form() -> None:
    for form, bits in ((Form(8), 8.01), (Form(4, 32), 4.51), (Form(4, 128), 4.13)):
        packed = PackedMatrix(torch.randn(256, 4096), form, None, Workspace())
        assert packed.nbytes <= 256 * 4096 * bits / 8 + 4096


@compiled
def test_a_group_whose_sums_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="65536"):
        PackedMatrix(torch.zeros(1, 70000), Form(8), None, Workspace())
    packed = PackedMatrix(torch.full((16, 65536), 1.0), Form(8), None, Workspace())
    assert packed.multiply(torch.full((1, 65536), -1.0))[0, 0].item() == pytest.approx(-65536, rel=0.01)


@compiled
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.parametrize(
    "form", [Form(8), Form(8, digits=2), Form(8, 64), Form(8, 128, digits=2), Form(8, 40), Form(4, 32)]
)
def test_tile_registers_compute_the_same(
    form: Form, emulated_kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agree to the bit where products and sums of floats are rounded together (FMA): sums of a group are of
    integers.
    """
    allowed = 0.0 if "avx512_vnni" in library.features() else 1e-5
    for n, k in ((1, 1), (16, 64), (33, 72), (130, 200), (64, 256)):
        weight, bias = _made(form, n, k)
        vectors = PackedMatrix(weight, form, bias, Workspace())
        with monkeypatch.context() as patch:
            patch.setattr(matmul, "_kernels", _functions(emulated_kernels))
            tiles = PackedMatrix(weight, form, bias, Workspace())
        for m in (1, 4, 9, 16, 17, 33, 70):
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
            torch.testing.assert_close(tiles.multiply(x), vectors.multiply(x), rtol=allowed, atol=allowed)


def _functions(loaded: ctypes.CDLL) -> Callable[[], Any]:
    """Return what ``matmul._kernels`` would return with this library."""
    uncached = matmul._kernels.__wrapped__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: loaded)
        found = uncached()
    return lambda: found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_each_generation_of_processors_computes_the_same(march: str, tmp_path: Path) -> None:
    """Agree to the bit where products and sums of floats are rounded together (FMA); sums of a group are exact in
    any.
    """
    if march == "x86-64-v4" and "avx512bw" not in library.features():
        pytest.skip("this processor has no AVX-512")
    target = compiler.shared_library(*SOURCES, flags=[f"-march={march}"])
    script = """
import ctypes, sys, torch
from ferrule_kernels.cpu import library, matmul
from ferrule_kernels.cpu.bank import Abreast
if sys.argv[1]:
    library.load = lambda: ctypes.CDLL(sys.argv[1])
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form, Levels
from tests import compiler
torch.manual_seed(0)
made = []
forms = [Form(8), Form(8, digits=2), Form(4, 32), Form(4, 64), Form(6, 16), Form(5, 32, 2), Form(3, 32), Form(2, 16)]
matrices = [PackedMatrix(torch.randn(70, 100), form, None, Workspace()) for form in forms]
codes, coded = torch.randint(0, 16, (70, 100)).to(torch.int8), Form(4, 32, table=tuple(range(-120, 128, 16)))
matrices.append(PackedMatrix(codes, coded, None, Workspace(), torch.rand(70, 4).bfloat16().float()))
for bits, group, steps, offsets in ((4, 32, 8, True), (6, 16, 8, False), (3, 16, 8, False), (2, 16, 4, True)):
    form, top = Form(bits, group, offsets=offsets, halves=True, block=256, steps=steps), 15 if steps == 4 else 63
    steps = [torch.randint(0, top, (70, 256 // group)).to(torch.int8) for _ in range(2)]
    given = [Levels(torch.rand(70, 1).half().float(), each) for each in steps]
    numbers = torch.randint(form.lowest, form.lowest + (1 << bits), (70, 100)).to(torch.int8)
    matrices.append(PackedMatrix(numbers, form, None, Workspace(), *given[: 1 + offsets]))
for packed in matrices:
    made += [packed.multiply(torch.randn(m, 100)) for m in (1, 2, 3, 4, 5, 17)]
torch.save(torch.cat(made), sys.argv[2])
"""
    made = []
    for path in ("", str(target)):
        subprocess.run([sys.executable, "-c", script, path, str(tmp_path / "out")], check=True)
        made.append(torch.load(tmp_path / "out", weights_only=True))
    allowed = 1e-6 if march == "x86-64" else 0.0  # of the largest number: sums of large terms may be small
    torch.testing.assert_close(made[0], made[1], rtol=0.0, atol=allowed * made[0].abs().max().item())
