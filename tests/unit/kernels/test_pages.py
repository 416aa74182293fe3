"""Copies into new memory."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cpu import pages
from ferrule_kernels.cpu.pages import copy_to_new
from tests.unit.kernels.test_matmul import compiled

COUNT = (5 << 20) + 4097


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that the kernel makes."""
    kernel, sizes = pages._copy(), list[int]()

    def copy(to: int, source: int, size: int) -> None:
        sizes.append(size)
        if kernel is not None:
            kernel(to, source, size)

    monkeypatch.setattr(pages, "_copy", lambda: copy)
    return sizes


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@compiled
@pytest.mark.parametrize("start", [0, 1, 63, 4096])
def test_every_byte_is_copied_and_none_beside_them(start: int, copied: list[int]) -> None:
    source = drawn(COUNT)
    whole = torch.full((start + COUNT + 5,), 7, dtype=torch.uint8)
    copy_to_new(whole[start : start + COUNT], source)
    assert torch.equal(whole[start : start + COUNT], source)
    assert whole[:start].eq(7).all()
    assert whole[start + COUNT :].eq(7).all()
    assert copied == [COUNT]


@compiled
def test_memory_that_was_written_already(copied: list[int]) -> None:
    source, to = drawn(COUNT), torch.zeros(COUNT, dtype=torch.uint8)
    for _ in range(2):
        copy_to_new(to, source)
        assert torch.equal(to, source)
    assert copied == [COUNT, COUNT]


def test_other_copies_are_those_of_torch(copied: list[int]) -> None:
    """What converts, turns or repeats its source, and what is small."""
    numbers = drawn(2048, 1024).float()
    expected = {
        "converted": (torch.empty(2048, 1024, dtype=torch.bfloat16), numbers),
        "turned": (torch.empty(1024, 2048), numbers.t()),
        "repeated": (torch.empty(2048, 1024), numbers[:, :1].expand(2048, 1024)),
        "columns": (torch.empty(2048, 2048)[:, 7:1031], numbers),
        "negative": (torch.empty(2048, 1024), torch._neg_view(numbers)),
        "small": (torch.empty(1024), numbers[0]),
    }
    for name, (to, source) in expected.items():
        copy_to_new(to, source)
        assert torch.equal(to, source.to(to.dtype)), name
    assert copied == []
    with pytest.raises(RuntimeError, match="size"):
        copy_to_new(torch.empty(2048, 1023), numbers)
