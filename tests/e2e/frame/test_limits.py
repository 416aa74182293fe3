"""Limits of the HTTP frame with the real command: full queues, slow and idle clients, no descriptors left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ferrule_testkit import server as servers

LONG = {"prompt": "Hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "a", "max_tokens": 1}
GONE = '"POST /v1/completions HTTP/1.1" 499'


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> servers.Gate:
    return servers.Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def server(gate: servers.Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run a server with one sequence at a time, and two that may wait."""
    args = [*servers.WITHOUT_MODEL, *servers.FEW_ROUTES, *gate.args]
    args += ["--max-num-seqs", "1", "--max-waiting-requests", "2", "--max-waiting-tokens", "300"]
    with servers.running(args, tmp_path_factory.mktemp("server") / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run a server with little patience: a busy machine may be too slow for it, so a client asks until its answer
    comes.
    """
    args = ["--header-timeout", "1", "--body-timeout", "1", "--keep-alive-timeout", "1", "--write-timeout", "1"]
    args += [*servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
    with servers.running(args, tmp_path_factory.mktemp("hasty") / "log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture
def http(server: servers.Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as found:
        yield found


def idle(server: servers.Server) -> bool:
    """Return whether no request runs or waits; also False without an answer."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/metrics", timeout=240) as response:
        found = re.findall(rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", response.read(), re.M)
        return bool(found) and not any(map(float, found))
    return False


def answered(http: httpx.Client, body: dict[str, Any]) -> bool:
    """Return whether there is room again, once the clients that took it have gone."""
    return servers.until(lambda: http.post("/v1/completions", json=body).status_code == 200)


@contextlib.contextmanager
def occupied(http: httpx.Client, gate: servers.Gate, bodies: list[dict[str, Any]]) -> Iterator[None]:
    """Run the first body's stream, and let the others' wait."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(gate.shut(after=4))
        kept = []
        for body in bodies:
            stream = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            assert stream.status_code == 200
            kept.append(stream.iter_lines())
            if len(kept) == 1:
                assert any(line.startswith("data: {") for line in kept[0])
        yield


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 429, response.text
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("RateLimitError", 429)
    return str(error["message"])


def test_a_full_queue_is_a_429_with_retry_after(http: httpx.Client, gate: servers.Gate) -> None:
    with occupied(http, gate, [LONG, LONG, LONG]):
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ):
            assert "queue is full" in refusal(http.post(path, json=body))
        assert http.get("/health").status_code == 200
        seen = http.post("/v1/completions", json={"prompt": "a"}, headers={"origin": "https://page.example"})
        assert "queue is full" in refusal(seen)
        assert seen.headers["access-control-allow-origin"] == "*"  # so that a script can read why
    assert answered(http, SHORT)


def test_too_many_waiting_tokens_are_a_429(http: httpx.Client, gate: servers.Gate) -> None:
    long = {"prompt": [5] * 200, "max_tokens": 1}
    with occupied(http, gate, [LONG, {**long, "stream": True}]):
        assert "prompt tokens" in refusal(http.post("/v1/completions", json=long))
        refused = http.post("/v1/completions", json={"prompt": [5] * 301, "max_tokens": 1})
        assert refused.status_code == 400  # it could never wait
        assert refused.json()["error"]["param"] == "prompt"
    assert answered(http, long)


def closed(sock: socket.socket) -> bytes:
    """Return everything that comes until the server closes."""
    found = b""
    sock.settimeout(240)
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            found += piece
    return found


def test_slow_and_idle_clients_are_closed(hasty: servers.Server) -> None:
    """Close headers that come byte by byte, a body that stops, and an idle connection, while others are served."""
    address = ("127.0.0.1", hasty.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"

    def done() -> bytes:
        with socket.create_connection(address, 240) as sock:
            sock.sendall(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
            return closed(sock)

    with contextlib.ExitStack() as stack:
        silent, loris, stopped = (stack.enter_context(socket.create_connection(address, 240)) for _ in range(3))
        with contextlib.suppress(OSError):  # closed in the middle of it
            stopped.sendall(head)
            for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 3000:
                loris.sendall(bytes([byte]))
                assert servers.until(lambda: hasty.health() == 200)
        assert b" 408 " in closed(silent)
        closed(loris)  # by now reset, perhaps, for what it sent after the answer
        assert b" 408 " in closed(stopped)
        assert servers.until(lambda: b" 200 " in done())


def test_a_reader_that_never_reads_is_cut(hasty: servers.Server) -> None:
    left = hasty.text().count(GONE)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", hasty.port))
    # Enough text to fill every buffer on the way.
    body = json.dumps({**LONG, "logprobs": 20, "n": 16}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert servers.until(lambda: hasty.text().count(GONE) > left)
    assert servers.until(lambda: idle(hasty))
    sock.close()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_it_recovers_from_a_lack_of_descriptors(server: servers.Server, http: httpx.Client) -> None:
    """Serve new clients again once some descriptors are free; without any they are not served, and nothing dies."""
    assert server.says("chat template")  # its child has been started
    pid = next(pid for name, pid in server.children().items() if name.startswith("api"))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    children, used = server.children(), descriptors(pid)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        crowd = [socket.create_connection(("127.0.0.1", server.port), 240) for _ in range(60)]
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{server.url}/health", timeout=0.5)
        for sock in crowd:
            sock.close()
        assert servers.until(lambda: server.health() == 200)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert server.children() == children
    assert answered(http, SHORT)
    assert servers.until(lambda: descriptors(pid) <= used + 1)


@pytest.mark.slow
def test_a_crowd_of_slow_clients_hinders_nobody(tmp_path: Path) -> None:
    """Answer a chat beside a thousand clients that send nothing and a thousand slow ones, and close all of them."""
    args = [*servers.WITHOUT_MODEL, "--header-timeout", "30"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        crowd = [socket.create_connection(("127.0.0.1", server.port), 240) for _ in range(2000)]
        for sock in crowd[1000:]:
            sock.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with httpx.Client(base_url=server.url, timeout=240) as http:
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert all(b" 408 " in closed(sock) for sock in crowd)
        assert server.health() == 200
