"""Servers of several files: one for protocols that agents speak, with tools, thoughts and a key, one without a key, and
one that allows all that a request can ask for. Each runs in the test's process, for the tests of one file: what they
ask about goes over HTTP, and processes of servers are what tests/e2e/launch is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.serving import Here, serving_here

AGENT_KEY = "sk-test"
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
_GENEROUS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "other", "--num-gpu-blocks-override", "512"),
    *("--enable-prompt-embeds", "--enable-prompt-tokens-details", "--trust-request-chat-template"),
    *("--enable-request-id-headers", "--max-logprobs", "-1", "--scheduling-policy", "priority"),
    *("--target-first-token-ms", "5000", "--target-inter-token-ms", "500"),
)
_SMALL = ("--num-gpu-blocks-override", "512", "--served-model-name", "tiny", "--dtype", "float32")


@pytest.fixture(scope="module")
def agent_server() -> Iterator[Here]:
    """Serve the embedded model behind a key. No test ends or changes the server."""
    with serving_here([*_TOOLS, *_SMALL, "--api-key", AGENT_KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[Here]:
    """Serve the embedded model, which calls tools and thinks. No test ends or changes the server."""
    with serving_here([*_TOOLS, *_SMALL, "--max-model-len", "1024"]) as running:
        yield running


@pytest.fixture(scope="module")
def generous_server(tiny_llama: Path) -> Iterator[Here]:
    """Serve the random Llama with everything that a request can ask for switched on, and routes for administration. No
    test ends or changes the server.
    """
    with serving_here([str(tiny_llama), *_GENEROUS], {"FERRULE_SERVER_DEV_MODE": "1"}) as running:
        yield running
