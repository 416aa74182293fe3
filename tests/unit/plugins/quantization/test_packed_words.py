"""Numbers of few bits in words: the kernel and torch read the same."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cpu import blocks, library
from ferrule_quant import packed_words


@pytest.mark.parametrize("order", [(), packed_words.AWQ_ORDER, packed_words.AWQ_ORDER_8])
@pytest.mark.parametrize("bits", range(1, 9))
def test_kernel_and_torch_unpack_the_same(bits: int, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    _, across = packed_words.per_words(bits)
    for shape in ((3, across * 6), (1, across * 2), (300, across * 128)):
        packed = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)
        for given in (packed, packed.t().contiguous().t()):  # rows that are apart
            found = packed_words.unpacked(given, bits, order)
            with monkeypatch.context() as patch:
                patch.setattr(library, "available", lambda: False)
                assert torch.equal(found, packed_words.unpacked(given, bits, order))
            assert found.dtype == torch.uint8
            assert found.shape == (shape[0], shape[1] * 32 // bits)


def test_numbers_are_the_lowest_bits_first() -> None:
    assert packed_words.unpacked(torch.tensor([[0x76543210]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    three = torch.tensor([[1 << 30, 1, 0]], dtype=torch.int32)  # the eleventh number is in two words
    assert packed_words.unpacked(three, 3)[0].tolist() == [0] * 10 + [5] + [0] * 21


def test_what_is_no_group_of_numbers_is_refused() -> None:
    for shape, bits in (((2, 2), 3), ((2, 4), 5), ((2, 2), 0), ((2, 2), 9)):
        with pytest.raises(ValueError, match="not groups of eight numbers"):
            blocks.unpack(torch.zeros(shape, dtype=torch.int32), bits)
    with pytest.raises(ValueError, match="not groups of eight numbers"):
        blocks.unpack(torch.zeros(2, 2, dtype=torch.int16), 4)
    with pytest.raises(ValueError, match="not a permutation"):
        blocks.unpack(torch.zeros(2, 2, dtype=torch.int32), 4, (0, 1, 2, 3, 4, 5, 6, 8))
