"""Layers that are made outside of a model have the CPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrule.interfaces.kernels import Kernels
from ferrule_nn.ops import using


@pytest.fixture(scope="module", autouse=True)
def with_cpu_kernels(cpu_kernels: Kernels) -> Iterator[None]:
    with using(cpu_kernels):
        yield
