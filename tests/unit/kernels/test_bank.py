"""Several packed matrices in one call: the same bits as one call for each."""

from __future__ import annotations

import pytest
import torch

from ferrule_kernels.cpu import dense, library
from ferrule_kernels.cpu.bank import MatrixBank
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.matmul import Form

try:
    library.load()
except library.KernelsUnavailableError as error:
    pytest.skip(f"there are no compiled kernels here: {error}", allow_module_level=True)

FORMS = [None, Form(8), Form(8, 64), Form(4, 32, digits=2)]  # None: bfloat16
COUNTS = [[1, 1], [3, 0, 70], [65], [2, 9, 33]]  # rows of matrices 4, 1, 3


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
            which = [4, 1, 3][: len(counts)]
            x = torch.randn(sum(counts), k).to(dtype)
            pieces = zip(which, x.split(counts), strict=True)
            expected = torch.cat([matrices[index].multiply(piece) for index, piece in pieces])
            assert torch.equal(bank.multiply(x, which, counts), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_shared_rows(form: Form | None, rows: int) -> None:
    matrices = _matrices(form, 48, 64)
    bank = MatrixBank.of(matrices)
    assert bank is not None
    x = torch.randn(rows, 64).bfloat16()
    expected = torch.cat([matrices[index].multiply(x) for index in (2, 0, 4)])
    assert torch.equal(bank.multiply(x, [2, 0, 4], [rows] * 3, shared=True), expected)


def test_what_no_bank_can_be_made_of() -> None:
    workspace, weight = Workspace(), torch.randn(32, 32)
    matrix = PackedMatrix(weight, Form(8), None, workspace)
    assert MatrixBank.of([]) is None
    assert MatrixBank.of([matrix, None]) is None
    assert MatrixBank.of([matrix, PackedMatrix(weight, Form(4, 32), None, workspace)]) is None
    assert MatrixBank.of([matrix, PackedMatrix(weight[:16], Form(8), None, workspace)]) is None
