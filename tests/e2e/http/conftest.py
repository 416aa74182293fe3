"""Servers of several files: one for protocols that agents speak, with tools, thoughts and a key, and one that allows
all that a request can ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule_testkit import server as servers

AGENT_KEY = "sk-test"
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
_GENEROUS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "other", "--num-gpu-blocks-override", "512"),
    *("--enable-prompt-embeds", "--enable-prompt-tokens-details", "--trust-request-chat-template"),
    *("--enable-request-id-headers", "--max-logprobs", "-1", "--scheduling-policy", "priority"),
    *("--target-first-token-ms", "5000", "--target-inter-token-ms", "500"),
)
_SMALL = ("--num-gpu-blocks-override", "512", "--served-model-name", "tiny", "--dtype", "float32")


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run `ferrule serve` on the embedded model, shared by the tests of a process. No test ends or changes it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with servers.running([*_TOOLS, *_SMALL, "--api-key", AGENT_KEY], log, {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture(scope="session")
def generous_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run the random Llama with everything that a request can ask for switched on, and routes for administration,
    shared by the tests of a process. No test ends or changes it.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    env = {"OMP_NUM_THREADS": "1", "FERRULE_SERVER_DEV_MODE": "1"}
    with servers.running([str(tiny_llama), *_GENEROUS], log, env) as running:
        yield running
