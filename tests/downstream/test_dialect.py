"""A protocol of a stranger with a dialect of its own, in the real server: named events, its errors, its key header.

Its errors are its own in every case, also where no route has seen the request; those of other protocols stay OpenAI's.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from ferrule_testkit import server as servers

KEY = "open sesame"
LIMIT = 20_000
SAY = "/acme/v2/say"
MINE = {"x-acme-key": KEY}
TEXT = {"text": "Once upon a time", "most": 3}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> servers.Gate:
    return servers.Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(gate: servers.Gate, installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    args = [*servers.WITHOUT_MODEL, *gate.args, "--plugins-allow", "acme-protocol"]
    args += ["--routers", "openai", "health", "docs", "acme_dialogue", "--api-key", KEY, "--sse-keepalive", "0.1"]
    args += ["--max-body-bytes", str(LIMIT), "--max-header-bytes", "8192"]
    log = tmp_path_factory.mktemp("dialect") / "log"
    with servers.running(args, log, installed.environment("acme_protocol")) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: servers.Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as found:
        yield found


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, data) of each event."""
    rows = [block.split("\n") for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in rows]


def test_its_stream_has_named_events_and_no_last_line(http: httpx.Client) -> None:
    answer = http.post(SAY, json=TEXT, headers=MINE)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [(name, data) for name, data in events_of(answer.text) if name != "hm"]
    assert [name for name, _ in events][0] == "begin"
    assert {name for name, _ in events[1:-1]} == {"word"}
    assert events[-1] == ("end", {"event": "end", "why": "length"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (MINE, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        (MINE | {"authorization": "Bearer wrong"}, 200),
        ({}, 401),
        ({"x-acme-key": ""}, 401),
        ({"x-acme-key": f"Bearer {KEY}"}, 401),
        ({"x-acme-key": "wrong", "authorization": f"Bearer {KEY}"}, 401),
        ({"authorization": KEY}, 401),
    ],
)
def test_its_header_carries_the_key(headers: Mapping[str, str], status: int, http: httpx.Client) -> None:
    answer = http.post(SAY, json=TEXT, headers=headers)
    assert answer.status_code == status
    if status == 401:
        why = "A valid API key is needed: send the header 'x-acme-key: KEY'."
        assert answer.json() == {"event": "trouble", "word": "not known", "why": why}


def test_a_header_that_comes_twice_is_no_key(http: httpx.Client) -> None:
    assert http.post(SAY, json=TEXT, headers=[("x-acme-key", KEY)] * 2).status_code == 401


def test_its_header_opens_no_other_route(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers=MINE)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
    assert http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("POST", SAY, b"{", 400, "not understood"),
        ("POST", SAY, b"[1]", 400, "not understood"),
        ("POST", SAY, b"[" * 5000, 400, "not understood"),
        ("POST", SAY, json.dumps({"text": "a" * LIMIT}).encode(), 413, "too much"),
        ("GET", SAY, b"", 405, "failed"),
        ("POST", f"{SAY}/", b"{}", 404, "not here"),
        ("GET", "/acme/v2", b"", 404, "not here"),
        ("GET", "/acme/v2/nothing/here?a=b", b"", 404, "not here"),
        ("GET", "//acme//v2//say", b"", 404, "not here"),
    ],
)
def test_errors_are_its_own(method: str, path: str, body: bytes, status: int, word: str, http: httpx.Client) -> None:
    headers = MINE | {"content-type": "application/json"}
    answer = http.request(method, httpx.URL(http.base_url, raw_path=path.encode()), content=body, headers=headers)
    found = answer.json()
    assert (answer.status_code, found["event"], found["word"]) == (status, "trouble", word)
    assert found["why"]


def test_a_wrong_field_is_named(http: httpx.Client) -> None:
    answer = http.post(SAY, json={"text": "a", "most": 0}, headers=MINE)
    assert (answer.status_code, answer.json()["where"]) == (400, "most")


@pytest.mark.parametrize("path", ["/acme/v1/nothing", "/acme/v2x", "/v1/nothing"])
def test_errors_of_other_paths_are_not(path: str, http: httpx.Client) -> None:
    answer = http.get(path, headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status_code, set(answer.json())) == (404, {"error"})


def test_an_error_of_the_parser_is_its_own_too(server: servers.Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as connection:
        connection.sendall(f"POST {SAY} HTTP/1.1\r\nhost: x\r\nx-long: {'a' * 9000}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["event"] == "trouble"


def test_it_is_described(http: httpx.Client) -> None:
    page = http.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    operation = page["paths"][SAY]["post"]
    assert operation["security"] == [{"key": []}, {"x-acme-key": []}]
    assert page["components"]["securitySchemes"]["x-acme-key"]["name"] == "x-acme-key"
    assert operation["responses"]["401"]["content"]["application/json"]["schema"]["required"][0] == "event"
    assert page["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]


def test_pings_refusals_and_the_end_while_the_server_stops(
    server: servers.Server, gate: servers.Gate, http: httpx.Client
) -> None:
    """Stop the server: this is the last test."""
    with gate.shut(after=2), http.stream("POST", SAY, json=TEXT | {"most": 64}, headers=MINE) as stream:
        pieces = stream.iter_text()
        said = next(pieces)
        while "event: hm\n" not in said:
            said += next(pieces)
        server.process.send_signal(signal.SIGTERM)
        assert server.says("draining")
        refused = http.post(SAY, json=TEXT, headers=MINE)
        assert (refused.status_code, refused.json()["word"]) == (503, "not now")
        server.process.send_signal(signal.SIGTERM)
        said += "".join(pieces)
    name, data = events_of(said)[-1]
    assert (name, data["word"]) == ("trouble", "not now")
