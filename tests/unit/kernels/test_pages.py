"""Copies into new memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import platform
import weakref
from pathlib import Path

import pytest
import torch

from ferrule_kernels.cpu import pages
from ferrule_kernels.cpu.pages import copy_to_new, interleave, memory_nodes, weight_memory
from tests.unit.kernels.test_matmul import compiled

COUNT = (5 << 20) + 4097


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each copy that the kernel makes."""
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
    """Leave to torch copies that convert, transpose or repeat their source, and small ones."""
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


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", (0,)), ("0-1\n", (0, 1)), ("0,2-3,65\n", (0, 2, 3, 65)), ("\n", ()), (None, ())]
)
def test_nodes_that_have_memory(text: str | None, nodes: tuple[int, ...], tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "has_memory").write_text(text)
    assert memory_nodes(tmp_path) == nodes


def _policy(address: int) -> int:
    """Return the memory policy of a page: get_mempolicy(2) with MPOL_F_ADDR."""
    mode, number = ctypes.c_int(-1), {"x86_64": 239, "aarch64": 236}[platform.machine()]
    call = ctypes.CDLL(None).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong)
    assert call(number, ctypes.byref(mode), None, 0, address, 2) == 0
    return mode.value


@pytest.mark.skipif(not memory_nodes(), reason="the system does not tell its nodes")
def test_pages_come_from_nodes_in_turn() -> None:
    memory = mmap.mmap(-1, 4 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not interleave(address, 2 << 20, memory_nodes()):
        pytest.skip("the container does not allow it")
    assert [_policy(address + at) for at in (0, 1 << 20, 2 << 20)] == [3, 3, 0]
    assert not interleave(address + 1, 4096, memory_nodes())  # no whole page
    assert not interleave(address, 4096, ())


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """Return the pieces that memory for weights is cut from, by a cutter of the test's own."""
    made, pieces, map_ = list[weakref.ref[mmap.mmap]](), pages._Pieces(), pages._map

    def remembered(size: int) -> memoryview:
        memory = map_(size)
        made.append(weakref.ref(memory.obj))  # type: ignore[arg-type]
        return memory

    monkeypatch.setattr(pages, "_map", remembered)
    monkeypatch.setattr(pages, "_pieces", lambda: pieces)
    return made


def test_memory_for_weights_is_like_any(mapped: list[weakref.ref[mmap.mmap]]) -> None:
    shapes = [(3, 5), (1 << 20, 3), (1 << 21,), (0,), (7, 300_001), (1 << 23, 5), (1 << 22,), (1 << 22,), (2, 1 << 22)]
    made = [weight_memory(shape, torch.bfloat16) for shape in shapes]
    for number, (memory, shape) in enumerate(zip(made, shapes, strict=True)):
        assert (tuple(memory.shape), memory.dtype) == (shape, torch.bfloat16)
        assert memory.data_ptr() % 64 == 0
        memory.fill_(number)
    assert all(bool((memory == number).all()) for number, memory in enumerate(made))  # none is in another's
    assert len(mapped) == 3 if hasattr(mmap, "MADV_HUGEPAGE") else not mapped  # one has its own


def test_a_piece_lives_as_long_as_what_is_in_it(mapped: list[weakref.ref[mmap.mmap]]) -> None:
    first, second = weight_memory((3 << 20,), torch.bfloat16), weight_memory((3 << 20,), torch.bfloat16)
    third = [weight_memory((11 << 19,), torch.bfloat16) for _ in range(3)]  # two of them are in another piece
    if not mapped:
        pytest.skip("this system does not tell of huge pages")
    del first
    gc.collect()
    assert [each() is not None for each in mapped] == [True, True]
    del second, third[0]
    gc.collect()
    assert [each() is not None for each in mapped] == [False, True]
    del third


def test_memory_that_is_not_there_is_a_memory_error(
    mapped: list[weakref.ref[mmap.mmap]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises((MemoryError, RuntimeError), match="cannot be mapped|can't allocate"):
        weight_memory((1 << 50,), torch.bfloat16)
