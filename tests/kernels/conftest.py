"""Kernels of `ferrule_kernels.cuda` run on a GPU where there is one, elsewhere under Triton's interpreter."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before its interpreter was asked for, which tests/conftest.py does")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_gpu(device: torch.device) -> bool:
    """Whether this is the real thing: bfloat16 products are right, and speed is a matter."""
    return device.type == "cuda"
