"""What is wrong with templates, tokenizers and parsers is found before the engine is ready, in every kind of start."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from ferrule import LLM
from ferrule.config import Config, FrontendConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule.hooks import HookRunner
from ferrule.launch import api_main
from ferrule.llm import offline
from ferrule.plugin import discover
from ferrule.wire.board import Board
from ferrule_contrib import tiny

_BAD = "{% for %}"


class _NeverReady:
    """A client whose engine still loads."""

    def __init__(self) -> None:
        self.board = Board()

    async def wait_ready(self) -> None:
        raise AssertionError("the engine was waited for")

    async def close(self) -> None:
        """Nothing is open."""


def test_an_api_process_does_not_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(config: Any, plugins: Any, listener: Any, connect: Any, hooks: Any, board: Any) -> int:
        await connect()
        return 0

    monkeypatch.setattr(api_main, "serve", serve)
    config = resolve(Config(model=ModelConfig(model=str(tiny.path())), frontend=FrontendConfig(chat_template=_BAD)))
    client: Any = _NeverReady()
    with socket.socket() as listener, pytest.raises(ConfigError, match="syntax error in line 1"):
        asyncio.run(api_main._serve(config, discover(), HookRunner(), listener, client))


def test_an_llm_does_not_begin_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(*given: Any) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(offline, "InlineClient", client)
    with pytest.raises(ConfigError, match="syntax error in line 1"):
        LLM(str(tiny.path()), chat_template=_BAD)
