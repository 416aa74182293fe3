"""A server for the tests of protocols that agents speak: tools, thoughts and a key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrule_testkit import server as servers

AGENT_KEY = "sk-test"
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
_SMALL = ("--num-gpu-blocks-override", "512", "--served-model-name", "tiny", "--dtype", "float32")


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run `ferrule serve` on the embedded model, shared by the tests of a process. No test ends or changes it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with servers.running([*_TOOLS, *_SMALL, "--api-key", AGENT_KEY], log, {"OMP_NUM_THREADS": "1"}) as running:
        yield running
