"""What the door answers itself, and what it leaves to API processes; no process is started."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ferrule.config import Config, FrontendConfig
from ferrule.config.resolve import resolve
from ferrule.door.probes import ProbeReader, answer_bytes, health, health_answer
from ferrule.wire.board import BEAT, READY, STALLED, STATE, STATES, Board
from ferrule.wire.doorway import Offer, Probe

PROBES = {
    "GET /health": Probe("health"),
    "POST /ping": Probe("health"),
    "GET /metrics": Probe("metrics", keyed=True),
}


def reader(keys: Mapping[str, bytes] | None = None, **front: Any) -> ProbeReader:
    return ProbeReader(resolve(Config(frontend=FrontendConfig(**front))), Offer(PROBES, keys or {}))


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "host: x", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (head("GET /health"), "health"),
        (head("HEAD /health"), "health"),
        (head("POST /ping", "content-length: 0"), "health"),
        (head("GET /metrics"), "metrics"),
    ],
)
def test_probes_are_read(given: bytes, what: str) -> None:
    call = reader().read(given + b"GET /v1/models HTTP/1.1\r\n")
    assert call is not None
    assert (call.probe.what, call.length, call.keep_alive) == (what, len(given), True)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        head("GET /health")[:-2],  # not complete
        b"GET /hea",
        head("GET /v1/models"),
        head("GET /healthy"),
        head("GET /health?x=1"),
        head("POST /health"),
        head("GET /ping"),  # not offered
        head("DELETE /metrics"),
        head("GET /health").replace(b"1.1", b"1.0"),
        head("GET /health", "content-length: 5"),
        head("GET /health", "content-length: 0", "content-length: 5"),
        head("GET /health", "transfer-encoding: chunked"),
        head("GET /health", "origin: http://a.example"),
        head("GET /health", "expect: 100-continue"),
        head("GET /health", "upgrade: h2c", "connection: upgrade"),
        head("GET /health", "bad header"),
        head("GET /health", "a : b"),
        head("GET /health", *("x: y" for _ in range(200))),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
def test_everything_else_is_left_to_others(given: bytes) -> None:
    assert reader().read(given) is None


def test_the_key_is_needed_where_it_is() -> None:
    keyed = reader({"alice": hashlib.sha256(b"secret").digest()})
    assert keyed.read(head("GET /health"))
    found = keyed.read(head("GET /metrics", "authorization: Bearer secret"))
    assert found is not None
    assert found.key == "alice"
    for wrong in ((), ("authorization: Bearer other",), ("authorization: Bearer secret",) * 2, ("x-api-key: secret",)):
        assert keyed.read(head("GET /metrics", *wrong)) is None


def test_a_server_without_keys_answers_under_its_own_names_only() -> None:
    strange = head("GET /metrics").replace(b"host: x", b"host: rebound.example.com")
    assert reader().read(strange) is None
    assert reader(allowed_hosts=("rebound.example.com",)).read(strange)
    assert reader().read(strange.replace(b"/metrics", b"/health"))


def test_a_prefix_may_be_there() -> None:
    behind = reader(root_path="/llm/")
    assert [(found := behind.read(head(f"GET {path}"))) and found.path for path in ("/llm/health", "/health")] == [
        "/health",
        "/health",
    ]
    assert behind.read(head("GET /llmhealth")) is None


def test_a_client_may_close_and_name_a_request() -> None:
    call = reader().read(head("GET /health", "Connection: keep-alive, Close"))
    assert call is not None
    assert not call.keep_alive
    assert reader(enable_request_id_headers=True).read(head("GET /health", "x-request-id: a")) is None
    config = resolve(Config(frontend=FrontendConfig(enable_request_id_headers=True, allowed_origins=())))
    text = answer_bytes(call, (200, [("content-type", "text/plain")], b"body"), config).decode()
    assert text.startswith("HTTP/1.1 200 OK\r\ndate: ")
    assert "connection: close\r\n" in text
    assert "x-request-id: " in text
    assert "vary" not in text
    assert text.endswith("content-length: 4\r\n" + text.partition("content-length: 4\r\n")[2])
    assert text.endswith("\r\n\r\nbody")
    headless = reader().read(head("HEAD /health"))
    assert headless is not None
    assert answer_bytes(headless, (200, [], b"body"), config).endswith(b"\r\n\r\n")


class Processes:
    """A board with an engine and two API processes, as they write it."""

    def __init__(self, folder: Path) -> None:
        self.config = resolve(Config(frontend=FrontendConfig(api_server_count=2)))
        self.board = Board.create(folder / "board", 2)
        self.rows = [Board(folder / "board", row) for row in range(3)]
        for row in self.rows:
            row.put(BEAT, time.monotonic())

    def say(self, state: str) -> None:
        for row in self.rows[1:]:
            row.put(STATE, STATES.index(state))
            row.put(READY, state == "ready")

    def state(self, draining: bool = False) -> str:
        return health(self.config, self.board, draining).state


def test_health_is_what_all_processes_say(tmp_path: Path) -> None:
    server = Processes(tmp_path)
    assert server.state() == "starting"
    server.say("ready")
    server.rows[2].put(READY, 0.0)
    assert server.state() == "starting"
    server.rows[2].put(READY, 1.0)
    assert server.state() == "ready"
    assert server.state(draining=True) == "draining"
    server.rows[1].put(STATE, STATES.index("draining"))
    assert server.state() == "draining"
    server.rows[2].put(STATE, STATES.index("dead"))
    assert server.state() == "dead"


def test_who_shows_no_sign_of_life_is_stalled(tmp_path: Path) -> None:
    server = Processes(tmp_path)
    server.say("ready")
    server.rows[2].put(BEAT, time.monotonic() - 3600)
    found = health(server.config, server.board, draining=False)
    assert found.state == "stalled"
    assert "An API process" in found.detail
    server.rows[0].put(STALLED, 3600.0)
    assert "The engine" in health(server.config, server.board, draining=False).detail
    status, headers, body = health_answer(found)
    assert status == 503
    assert ("retry-after", "5") in headers
    assert json.loads(body)["error"]["code"] == 503
