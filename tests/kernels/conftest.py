"""Kernels of `ferrule_kernels.cuda` run on a GPU where there is one, elsewhere under Triton's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before its interpreter was asked for, which tests/conftest.py does")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the first and the last case of a parametrised test in `make test`, and those between them in `make
    test-slow`: the interpreter takes seconds for what a GPU does at once. On a GPU all run.
    """
    if torch.cuda.is_available():
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent == Path(__file__).parent:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        for item in each[1:-1]:
            item.add_marker("slow")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_gpu(device: torch.device) -> bool:
    """Return whether a real GPU is used: bfloat16 products are right, and speed matters."""
    return device.type == "cuda"
