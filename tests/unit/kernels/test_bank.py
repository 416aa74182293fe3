"""Several packed matrices in one call: the same bits as one call for each."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cpu import dense, library
from ferrule_kernels.cpu.bank import MatrixBank
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.cpu.recording import Arena, Recording
from ferrule_kernels.matmul import Form

try:
    library.load()
except library.KernelsUnavailableError as error:
    pytest.skip(f"there are no compiled kernels here: {error}", allow_module_level=True)

FORMS = [None, Form(8), Form(8, 64), Form(4, 32, digits=2)]  # None: bfloat16
COUNTS = [[0, 1, 0, 0, 1], [3, 0, 70, 0, 0], [0, 0, 0, 0, 65], [2, 9, 0, 33, 0], [0, 0, 0, 0, 0]]  # rows of each matrix


def _matrices(form: Form | None, n: int, k: int) -> list[DenseMatrix] | list[PackedMatrix]:
    draw = torch.Generator().manual_seed(n + k)
    weights = [torch.randn(n, k, generator=draw) for _ in range(5)]
    if form is None:
        if dense.unit() is None:
            pytest.skip("this processor multiplies no bfloat16")
        return [DenseMatrix(weight.bfloat16()) for weight in weights]
    workspace = Workspace()
    return [PackedMatrix(weight, form, None, workspace) for weight in weights]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(130, 72), (64, 256)])
def test_equals_one_product_after_the_other(form: Form | None, n: int, k: int) -> None:
    matrices = _matrices(form, n, k)
    bank = MatrixBank.of(matrices)
    assert bank is not None
    for dtype in (torch.bfloat16, torch.float32):
        if form is None and dtype == torch.float32:
            continue
        for counts in COUNTS:
            x = torch.randn(sum(counts), k).to(dtype)
            pieces = zip(matrices, x.split(counts), strict=True)
            expected = torch.cat([matrix.multiply(piece) for matrix, piece in pieces])
            assert torch.equal(bank.multiply(x, torch.tensor(counts), sum(counts)), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_shared_row(form: Form | None) -> None:
    """Multiply also by a matrix that is chosen twice, as a router of scores that are all infinite may choose an
    expert.
    """
    matrices = _matrices(form, 48, 64)
    x = torch.randn(1, 64).bfloat16()
    expected = torch.cat([matrices[index].multiply(x) for index in (0, 2, 2, 4)])
    assert torch.equal(MatrixBank(matrices).multiply(x, torch.tensor([1, 0, 2, 0, 1]), 4, shared=True), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_recording_reads_the_counts_again(form: Form | None) -> None:
    bank = MatrixBank(_matrices(form, 48, 64))
    x = torch.randn(6, 64).bfloat16()
    first, second = torch.tensor([1, 0, 3, 0, 2]), torch.tensor([0, 5, 0, 0, 1])
    expected = bank.multiply(x, second, 6)
    recording = Recording(Arena(), (x, first), lambda inputs: bank.multiply(*inputs, 6))
    recording.fill((x, second))
    assert torch.equal(recording.replay(), expected)


def test_what_no_bank_can_be_made_of() -> None:
    workspace, weight = Workspace(), torch.randn(32, 32)
    matrix = PackedMatrix(weight, Form(8), None, workspace)
    assert MatrixBank.of([]) is None
    assert MatrixBank.of([matrix, None]) is None
    assert MatrixBank.of([matrix, PackedMatrix(weight, Form(4, 32), None, workspace)]) is None
    assert MatrixBank.of([matrix, PackedMatrix(weight[:16], Form(8), None, workspace)]) is None
