"""`Case`: one kernel at one shape, as a module's `cases(device)` lists them for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. `run` launches it once, on tensors that are there already.

    `bytes` are those that have to be read and written, each once; `flops` the operations of its products.
    """

    name: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0


def half(device: torch.device) -> torch.dtype:
    """Return the 16-bit type of a case's activations.

    It is not bfloat16 under Triton's interpreter, whose bfloat16 products are wrong.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float16
