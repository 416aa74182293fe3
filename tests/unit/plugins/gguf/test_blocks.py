"""Quantized blocks: every bit pattern becomes the number that ggml's own code makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from ferrule_files.gguf.reader import FLOATS, TYPES
from ferrule_kernels.cpu import blocks as kernels
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form
from ferrule_plugins.gguf import blocks
from ferrule_plugins.gguf.blocks import decode, widen
from ferrule_plugins.quantization.gguf import form_of

QUANTIZED = [kind for kind in TYPES.values() if kind.name not in FLOATS]


def test_types_have_the_sizes_of_ggml() -> None:
    for number, kind in TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (theirs.name, *GGML_QUANT_SIZES[theirs]) == (kind.name, kind.size, kind.num_bytes)


def random_rows(kind: str, rows: int = 5, width: int = 512) -> np.ndarray:
    """Return blocks of any bits."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return np.random.default_rng(7).integers(0, 256, (rows, width // size * num_bytes), dtype=np.uint8)


@pytest.fixture(params=["kernel", "torch"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read blocks by the compiled kernel, or as where there is none."""
    assert blocks._compiled(torch.empty(1, 1, dtype=torch.uint8))
    if request.param == "torch":
        monkeypatch.setattr(blocks, "_compiled", lambda rows: False)
    return str(request.param)


@pytest.mark.parametrize("kind", [kind.name for kind in QUANTIZED])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of blocks whose scale is not a number
def test_blocks_are_the_numbers_that_ggml_makes_of_them(
    kind: str, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(kind)
    wanted = quants.dequantize(rows, GGMLQuantizationType[kind])
    assert np.isfinite(wanted).mean() > 0.5
    for at_a_time in (1 << 22, 1000):  # in one piece, and in several
        monkeypatch.setattr(blocks, "_ROWS", at_a_time)
        decoded = decode(kind, torch.from_numpy(rows))
        assert decoded.numbers.dtype == torch.int8
        assert np.array_equal(decoded.widened().numpy(), wanted, equal_nan=True)
        assert np.array_equal(widen(kind, torch.from_numpy(rows), torch.float32).numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("kind", [kind.name for kind in QUANTIZED])
def test_kernel_and_torch_read_the_same_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.from_numpy(random_rows(kind, rows=200))[::2]  # rows apart, enough for several threads
    ours = decode(kind, rows)
    monkeypatch.setattr(blocks, "_compiled", lambda rows: False)
    theirs = decode(kind, rows)
    assert torch.equal(ours.numbers, theirs.numbers)
    assert (ours.offsets is None, ours.table) == (theirs.offsets is None, theirs.table)
    for own, other in ((ours.scales, theirs.scales), (ours.offsets, theirs.offsets)):
        if own is not None and other is not None:
            torch.testing.assert_close(own.floats, other.floats, rtol=0, atol=0, equal_nan=True)
            assert own.steps is other.steps is None or torch.equal(own.steps, other.steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", blocks.BITS)
@pytest.mark.parametrize("rows", [150, 64, 3])
def test_blocks_are_packed_as_their_parts_are(kind: str, rows: int) -> None:
    """Pack in pieces: panels, and what is left."""
    given, form = torch.from_numpy(random_rows(kind, rows=2 * rows)) & 0x3F, form_of(kind)  # numbers are finite
    given = given[::2]
    parts, number = decode(kind, given), next(each for each, found in TYPES.items() if found.name == kind)
    wanted = PackedMatrix(parts.numbers, form, None, Workspace(), parts.scales, parts.offsets)
    packed = PackedMatrix.empty(rows, 512, form, Workspace())
    most = [packed.put_blocks(first, number, given[first : first + 64]) for first in range(0, rows, 64)]
    assert torch.equal(packed.packed, wanted.packed)
    assert max(most) == max(float(own.floats.abs().max()) for own in blocks._levels(parts))


def test_a_scale_that_is_no_number_is_told() -> None:
    given = torch.zeros(130, 34 * 2, dtype=torch.uint8)
    packed = PackedMatrix.empty(130, 64, Form(8, 32, halves=True), Workspace())
    for row, value in ((129, torch.inf), (65, torch.nan), (0, torch.inf)):
        given[row, 34:36] = torch.tensor([value]).half().view(torch.uint8)
        assert np.array_equal(packed.put_blocks(0, 8, given), np.inf if row == 129 else np.nan, equal_nan=True)


def test_blocks_of_another_form_are_not_packed() -> None:
    packed = PackedMatrix.empty(3, 512, form_of("Q4_K"), Workspace())
    for number, width in ((12, 144), (2, 288), (14, 420), (23, 272)):
        with pytest.raises(ValueError, match=f"blocks of the type {number} are not a weight of 512 inputs"):
            packed.put_blocks(0, number, torch.zeros(3, width, dtype=torch.uint8))


@pytest.mark.parametrize(("first", "count"), [(0, 4), (64, 1), (-64, 3), (1, 2)])
def test_rows_beyond_the_matrix_are_not_packed(first: int, count: int) -> None:
    packed = PackedMatrix.empty(3, 512, form_of("Q4_K"), Workspace())
    with pytest.raises(ValueError, match=f"{count} outputs from {first} on are not whole panels of 3"):
        packed.put_blocks(first, 12, torch.zeros(count, 288, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not whole panels of 3"):
        packed.put(first, torch.zeros(count, 512))


def test_no_rows_and_no_whole_blocks() -> None:
    assert decode("Q4_K", torch.empty(0, 144, dtype=torch.uint8)).numbers.shape == (0, 256)
    assert widen("Q4_0", torch.empty(0, 18, dtype=torch.uint8), torch.float16).shape == (0, 32)
    with pytest.raises(ValueError, match="not whole blocks of 144"):
        kernels.read(12, torch.zeros(2, 145, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no blocks of the type 9 "):
        kernels.read(9, torch.zeros(2, 144, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not become"):
        kernels.widen(12, torch.zeros(2, 144, dtype=torch.uint8), torch.empty(2, 255))


@pytest.mark.parametrize("at_a_time", [1 << 22, 1000])
def test_what_is_widened_is_put_in_its_place(at_a_time: int, reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_ROWS", at_a_time)
    rows = torch.from_numpy(random_rows("Q6_K"))
    place = torch.empty(5, 512, dtype=torch.bfloat16)
    assert widen("Q6_K", rows, torch.bfloat16, place) is place
    assert torch.equal(place.view(torch.int16), widen("Q6_K", rows, torch.bfloat16).view(torch.int16))


@pytest.mark.parametrize("kind", blocks.BITS)
def test_numbers_and_steps_are_those_of_the_kernels_form(kind: str) -> None:
    decoded, form = decode(kind, torch.from_numpy(random_rows(kind))), form_of(kind)
    if not form.table:
        lowest = -128 if form.bits == 8 else form.lowest
        assert int(decoded.numbers.min()) >= lowest
        assert int(decoded.numbers.max()) < lowest + (1 << form.bits)
    assert (decoded.offsets is not None) == form.offsets
    for own in (decoded.scales, decoded.offsets):
        if own is not None:
            assert own.floats.shape == (5, 512 // (form.block or form.group))
            assert (own.steps is not None) == bool(form.steps)
            assert own.steps is None or own.steps.shape == (5, 512 // form.group)
