"""Recordings: what is done again is what was done, for other values of the inputs."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ferrule_kernels.cpu.bank import Abreast, MatrixBank
from ferrule_kernels.cpu.dense import DenseMatrix
from ferrule_kernels.cpu.elementwise import RMSNorm
from ferrule_kernels.cpu.matmul import PackedMatrix, Workspace
from ferrule_kernels.cpu.recording import Arena, NotRecordableError, Recording
from ferrule_kernels.matmul import Form

WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
COUNTS = torch.tensor([2, 1])
ROWS = [torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

Compute = Callable[[torch.Tensor], torch.Tensor]


def replays(compute: Compute, inputs: list[torch.Tensor] = ROWS) -> Recording:
    """Record with the first of the inputs; the others must have the same bits replayed as computed."""
    arena = Arena()
    with torch.inference_mode():
        compute(inputs[0])
        recording = Recording(arena, inputs[:1], lambda given: compute(given[0]))
        assert torch.equal(recording.output, compute(inputs[0]))
        for values in (*inputs, *inputs):
            arena.fill(0xFF)
            recording.fill([values])
            assert torch.equal(recording.replay(), compute(values))
    return recording


FOUR, EIGHT = (PackedMatrix(WEIGHT, Form(bits, 32), None, Workspace()) for bits in (4, 8))
DENSE = DenseMatrix(WEIGHT.bfloat16())
NORM = RMSNorm(torch.rand(64), 1e-6, 0.0)
BANKS = MatrixBank([FOUR, FOUR]), MatrixBank([DENSE, DENSE])


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(FOUR.multiply, id="packed"),
        pytest.param(EIGHT.multiply, id="eight"),
        pytest.param(Abreast([FOUR, EIGHT]).multiply, id="abreast"),
        pytest.param(DENSE.multiply, id="dense"),
        pytest.param(NORM, id="norm"),
        pytest.param(lambda x: NORM.after(x, x * 2, 0.5)[1], id="sum"),
        pytest.param(lambda x: BANKS[0].multiply(x, COUNTS, 3), id="several"),
        pytest.param(lambda x: BANKS[1].multiply(x, COUNTS, 3), id="several dense"),
        pytest.param(lambda x: torch.cat([x.view(3, 2, 32)[:, 1], x[:, :3]], 1).float() * 2, id="torch"),
        pytest.param(lambda x: torch.zeros(3, 64).add_(x).t().contiguous(), id="in place"),
        pytest.param(lambda x: FOUR.multiply(F.pad(x[:, :30], (0, 34)) + torch.arange(64)), id="both"),
    ],
)
def test_a_replay_has_the_same_bits(compute: Compute) -> None:
    replays(compute)


def test_kernels_are_called_together() -> None:
    """Record kernels that follow each other as one step, and reuse their memory."""
    norm, down = RMSNorm(torch.rand(64).bfloat16(), 1e-6, 0.0), DenseMatrix(torch.randn(64, 64).bfloat16() / 8)

    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1000):
            x = down.multiply(norm(x))
        return x

    arena = Arena()
    recording = Recording(arena, [ROWS[0].bfloat16()], lambda given: compute(given[0]))
    assert len(recording._steps) == 1
    assert arena.nbytes == 1 << 20


def test_memory_of_recordings_is_shared() -> None:
    arena = Arena()
    wide = nn.Linear(64, 1 << 16).weight.detach().t()
    with torch.inference_mode():
        recordings = [Recording(arena, [rows], lambda given: (given[0] @ wide).relu() + 1) for rows in ROWS * 3]
        assert arena.nbytes <= 4 * 3 * wide.shape[1] * 4
        for recording, rows in zip(recordings, ROWS * 3, strict=True):
            recording.fill([rows])
            assert torch.equal(recording.replay(), (rows @ wide).relu() + 1)


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * float(x[0, 0]),
        lambda x: x * len(x.argmax(1).tolist()),
        lambda x: x + torch.from_numpy(x.numpy()),
        lambda x: x if x.any() else -x,
        lambda x: x[x > 0],
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: x.topk(2).values,
    ],
)
def test_what_depends_on_values_is_refused(reads: Compute) -> None:
    with pytest.raises(NotRecordableError), torch.inference_mode():
        Recording(Arena(), ROWS[:1], lambda given: reads(given[0]))
    replays(FOUR.multiply)  # nothing of it is left


def test_an_error_ends_a_recording() -> None:
    with pytest.raises(ZeroDivisionError):
        Recording(Arena(), ROWS[:1], lambda given: given[0] * (1 // 0))
    replays(FOUR.multiply)


def test_what_outlives_the_function_is_refused() -> None:
    """Refuse a tensor that the next recording would overwrite."""
    cache: list[torch.Tensor] = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        if not cache:
            cache.append(x + 1)
        return x * cache[0]

    with torch.inference_mode(), pytest.raises(NotRecordableError, match="still in use"):
        Recording(Arena(), ROWS[:1], lambda given: compute(given[0]))
    assert torch.equal(cache[0], ROWS[0] + 1)
    cache[0] = ROWS[0] + 1
    replays(compute)


class Host(np.ndarray[Any, Any]):
    """An array that can be waited for to go."""


def test_memory_that_kernels_read_is_kept() -> None:
    """Keep what only the function had as long as its recording."""
    made: list[weakref.ref[Host]] = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        host = np.ones((3, 64), np.float32).view(Host)
        made.append(weakref.ref(host))
        return NORM.after(x, torch.from_numpy(host), 1.0)[1]

    recording = replays(compute)
    gc.collect()
    assert [each() is not None for each in made] == [False, True] + [False] * (len(made) - 2)
    del recording
    gc.collect()
    assert made[1]() is None


def test_torch_s_compiler_is_not_imported() -> None:
    """Avoid the import, which would take seconds, in the first step that is recorded."""
    program = """
import sys, torch
from ferrule_kernels.cpu.recording import Arena, Recording

with torch.inference_mode():
    Recording(Arena(), [torch.zeros(3)], lambda inputs: (inputs[0] + 1) * 2)
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "sympy"))))
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
