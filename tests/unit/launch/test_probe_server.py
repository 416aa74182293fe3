"""The service behind `--probe-port`: the state by the board, and figures from files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ferrule.config import Config, FrontendConfig, StatSettings
from ferrule.config.resolve import resolve
from ferrule.errors import UnavailableError
from ferrule.interfaces.stats import HttpStats, StatLogger
from ferrule.launch import probe_server
from ferrule.launch.probe_server import BoardService, tell_model
from ferrule.plugin import discover
from ferrule.shared_memory.board import BEAT, READY, STALLED, STATE, STATES, Board
from ferrule_plugins.stat_logger.prometheus import Prometheus
from ferrule_testkit.service import fake_model

PLUGINS = discover()


class Processes:
    """A board with an engine and two API processes, as they write it."""

    def __init__(self, folder: Path) -> None:
        self.config = resolve(Config(frontend=FrontendConfig(api_server_count=2)))
        self.service = BoardService(self.config, PLUGINS, Board.create(folder / "board", 2), folder)
        self.rows = [Board(folder / "board", row) for row in range(3)]
        for row in self.rows:
            row.put(BEAT, time.monotonic())

    def say(self, state: str) -> None:
        for row in self.rows[1:]:
            row.put(STATE, STATES.index(state))
            row.put(READY, state == "ready")

    @property
    def state(self) -> str:
        return self.service.health().state


def test_health_is_what_all_processes_say(tmp_path: Path) -> None:
    server = Processes(tmp_path)
    assert server.state == "starting"
    server.say("ready")
    server.rows[2].put(READY, 0.0)
    assert server.state == "starting"
    server.rows[2].put(READY, 1.0)
    assert server.state == "ready"
    server.rows[1].put(STATE, STATES.index("draining"))
    assert server.state == "draining"
    server.rows[2].put(STATE, STATES.index("dead"))
    assert server.state == "dead"


def test_who_shows_no_sign_of_life_is_stalled(tmp_path: Path) -> None:
    server = Processes(tmp_path)
    server.say("ready")
    server.rows[2].put(BEAT, time.monotonic() - 3600)
    found = server.service.health()
    assert found.state == "stalled"
    assert "An API process" in found.detail
    server.rows[0].put(STALLED, 3600.0)
    assert "The engine" in server.service.health().detail


def test_figures_are_those_of_the_api_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Processes(tmp_path)
    with pytest.raises(UnavailableError, match="being loaded"):
        server.service.exposition()
    logger = Prometheus(StatSettings.of(server.config), fake_model())
    logger.share(tmp_path, 0)
    tell_model(tmp_path, fake_model())

    def count() -> str:
        logger.on_http(HttpStats(route="/x", method="GET", status=200, seconds=0.1, received=0, sent=1))
        lines = server.service.exposition()[1].splitlines()
        (line,) = [line for line in lines if line.startswith('http_requests_total{handler="/x"')]
        return line.split(" ")[-1]

    assert [count(), count()] == ["1.0", "1.0"]  # shown again
    monkeypatch.setattr(probe_server, "_FRESH", 0.0)
    assert count() == "3.0"


def test_a_logger_that_cannot_follow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Processes(tmp_path)
    tell_model(tmp_path, fake_model())
    monkeypatch.setattr(Prometheus, "follow", StatLogger.follow)
    with pytest.raises(UnavailableError, match="main port"):
        server.service.exposition()
