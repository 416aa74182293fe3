"""What is wrong and can be known without weights is found before they are loaded, in every kind of start."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM
from ferrule.client import inline
from ferrule.client.inline import InlineClient
from ferrule.config import Config, FrontendConfig, ModelConfig
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError
from ferrule.hooks import HookRunner
from ferrule.launch import api_main, cli, engine_main
from ferrule.launch.process import Boot
from ferrule.llm import backend
from ferrule.plugin import discover
from ferrule.shared_memory.board import CHECKED, Board
from ferrule_contrib import tiny

_BAD = "{% for %}"


class _NotLoading:
    """A client whose engine may not load weights."""

    def __init__(self) -> None:
        self.board = Board()

    def begin_loading(self) -> None:
        raise AssertionError("weights are loaded")

    async def close(self) -> None:
        """Do nothing: nothing is open."""


@pytest.mark.parametrize(
    ("front", "said"),
    [
        (FrontendConfig(chat_template=_BAD), "syntax error in line 1"),
        (FrontendConfig(ssl_certfile="./missing.pem"), "The --ssl options do not work"),
        (FrontendConfig(middleware=("missing.Layer",)), "--middleware missing.Layer cannot be loaded"),
    ],
)
def test_a_server_does_not_begin_to_load(front: FrontendConfig, said: str) -> None:
    config = resolve(Config(model=ModelConfig(model=str(tiny.path())), frontend=front))
    client: Any = _NotLoading()
    with socket.socket() as listener, pytest.raises(ConfigError, match=said):
        asyncio.run(api_main._serve(config, discover(), HookRunner(), listener, client, lambda: config))


def test_an_llm_does_not_begin_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(*given: Any) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(backend, "InlineClient", client)
    with pytest.raises(ConfigError, match="syntax error in line 1"):
        LLM(str(tiny.path()), chat_template=_BAD)


def test_a_batch_does_not_begin_to_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*given: Any, **more: Any) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(inline, "build_engine", build)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    words = ["run-batch", "-i", str(rows), "-o", str(tmp_path / "out.jsonl")]
    assert cli.main([*words, "--chat-template", _BAD]) != 0
    assert "syntax error in line 1" in capsys.readouterr().err
    assert cli.main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out.jsonl")]) != 0
    assert "Cannot read the input" in capsys.readouterr().err
    assert cli.main(["run-batch", "-i", str(rows), "-o", str(tmp_path / "none" / "out.jsonl")]) != 0
    assert "There is no folder" in capsys.readouterr().err


def test_an_engine_waits_for_every_api_process(tmp_path: Path) -> None:
    engine = Board.create(tmp_path / "board", 2)
    first, second = Board(tmp_path / "board", 1), Board(tmp_path / "board", 2)
    stopping = threading.Event()
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: done.append(engine.wait_checked(stopping)))
    waiting.start()
    first.put(CHECKED, 1.0)
    waiting.join(0.05)
    assert waiting.is_alive()
    second.put(CHECKED, 1.0)
    waiting.join()
    assert done == [True]
    first.put(CHECKED, 0.0)
    stopping.set()
    assert not engine.wait_checked(stopping)


def test_an_engine_that_is_stopped_while_it_imports_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def importing(*given: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(engine_main, "open_executor", importing)
    monkeypatch.setattr(engine_main, "EngineSocket", lambda path: None)
    monkeypatch.setattr(engine_main.os, "_exit", leave)
    monkeypatch.setattr(engine_main.os, "set_inheritable", lambda *given: None)
    Board.create(tmp_path / "board", 1)
    config = resolve(Config(model=ModelConfig(model=str(tiny.path()))))
    path = str(tmp_path / "engine-0.sock")
    boot = Boot(name="engine-0", role="engine", config=config, plugins=discover(), socket_path=path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            engine_main.run_engine(boot)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert caught.value.code == 0


def test_an_engine_in_this_process_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def build(*given: Any, **more: Any) -> None:
        began.set()
        raise ConfigError("it may load")

    monkeypatch.setattr(inline, "build_engine", build)
    config = resolve(Config(model=ModelConfig(model=str(tiny.path()))))

    async def main() -> None:
        client = InlineClient(config, discover(), checked=False)
        await asyncio.sleep(0.05)
        assert not began.is_set()
        client.begin_loading()
        with pytest.raises(ConfigError, match="it may load"):
            await client.wait_ready()
        await client.close()

    asyncio.run(main())
