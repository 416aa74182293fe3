"""Tests of the whole engine on a GPU: `make gpu-check`. FERRULE_TEST_DEVICE=cpu tries those on a CPU that can be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule import LLM
from ferrule_testkit.checkpoints import tiny_checkpoint

Open = Callable[..., LLM]


@pytest.fixture(scope="session")
def device() -> str:
    """Return the value of `--device`; without a GPU the tests are skipped."""
    wanted = os.environ.get("FERRULE_TEST_DEVICE", "cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return wanted


@pytest.fixture
def gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("this is a GPU's matter")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: tiny_checkpoint(name, folder / name)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open models with small caches, and close them at the end."""
    models: list[LLM] = []

    def open_model(folder: Path | str, **options: Any) -> LLM:
        settings = {"max_num_seqs": 16, "num_gpu_blocks_override": 512, "use_tqdm_on_load": False}
        settings["gpu_memory_utilization"] = 0.04  # for saved states; tests run beside each other
        models.append(LLM(str(folder), **{**settings, **options}))
        return models[-1]

    yield open_model
    for model in models:
        model.close()
