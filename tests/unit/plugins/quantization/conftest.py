"""What the tests of quantization share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import discover
from ferrule_nn.ops import using


@pytest.fixture(scope="module", autouse=True)
def with_cpu_kernels(cpu_kernels: Kernels) -> Iterator[None]:
    """Give layers that are made outside of a model the CPU's kernels."""
    with using(cpu_kernels):
        yield


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


@pytest.fixture
def folder(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads of this process, which a test that loads a model changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
