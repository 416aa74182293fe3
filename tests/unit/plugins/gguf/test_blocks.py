"""Quantized blocks: every bit pattern becomes the number that ggml's own code makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from ferrule_plugins.gguf import blocks
from ferrule_plugins.gguf.blocks import decode, widen
from ferrule_plugins.gguf.reader import FLOATS, TYPES
from ferrule_plugins.quantization.gguf import form_of

QUANTIZED = [kind for kind in TYPES.values() if kind.name not in FLOATS]


def test_types_have_the_sizes_of_ggml() -> None:
    for number, kind in TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (theirs.name, *GGML_QUANT_SIZES[theirs]) == (kind.name, kind.size, kind.num_bytes)


def random_rows(kind: str, rows: int = 5, width: int = 512) -> np.ndarray:
    """Blocks of any bits."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return np.random.default_rng(7).integers(0, 256, (rows, width // size * num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", [kind.name for kind in QUANTIZED])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of blocks whose scale is not a number
def test_blocks_are_the_numbers_that_ggml_makes_of_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(kind)
    wanted = quants.dequantize(rows, GGMLQuantizationType[kind])
    assert np.isfinite(wanted).mean() > 0.5
    for at_a_time in (1 << 22, 1000):  # in one piece, and in several
        monkeypatch.setattr(blocks, "_ROWS", at_a_time)
        decoded = decode(kind, torch.from_numpy(rows))
        assert decoded.numbers.dtype == torch.int8
        assert np.array_equal(decoded.widened().numpy(), wanted, equal_nan=True)
        assert np.array_equal(widen(kind, torch.from_numpy(rows), torch.float32).numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("at_a_time", [1 << 22, 1000])
def test_what_is_widened_is_put_in_its_place(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
