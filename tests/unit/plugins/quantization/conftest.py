"""What the tests of quantization share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import discover


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


@pytest.fixture
def folder(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test that loads a model changes the number of threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
