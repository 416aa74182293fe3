"""Fixtures of the end-to-end tests: tiny checkpoints, and real servers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ferrule_testkit import server as servers


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """Give commands and models of these tests as much time as the servers have."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.LIMITS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run `ferrule serve` on the random Llama in float32, shared by the tests of a process. No test ends or changes
    it.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--num-gpu-blocks-override", "512"]
    with servers.running(args, log, {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run `ferrule serve` on the embedded model, which calls tools and thinks, shared by the tests of a process. No
    test ends or changes it.
    """
    args = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    args += ["--dtype", "float32", "--served-model-name", "tiny", "ferrule-tiny", "--max-model-len", "1024"]
    args += ["--num-gpu-blocks-override", "512"]
    with servers.running(args, tmp_path_factory.mktemp("server") / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture
def client(server: servers.Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240) as found:
        yield found
