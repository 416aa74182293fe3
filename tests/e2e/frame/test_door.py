"""Probes with the real command: the launcher answers them as API processes do, and also when those do nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule_testkit import server as servers
from tests.e2e.frame.test_tls import Authority

ARGS = [*servers.WITHOUT_MODEL, "--num-gpu-blocks-override", "64"]
KEY = {"authorization": "Bearer secret"}
Answer = tuple[int, dict[str, str], bytes]


def ask(connection: http.client.HTTPConnection, path: str, headers: dict[str, str], method: str = "GET") -> Answer:
    """Status, headers and body; without what differs from one answer to the next."""
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    found = {name.lower(): value for name, value in response.getheaders() if name.lower() != "date"}
    return response.status, found, response.read()


@contextlib.contextmanager
def connected(port: int, context: ssl.SSLContext | None = None) -> Iterator[http.client.HTTPConnection]:
    kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
    options = {} if context is None else {"context": context}
    connection = kind("127.0.0.1", port, timeout=servers.PATIENCE, **options)
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture(scope="module")
def keyed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    args = [str(tiny_llama), *ARGS, "--api-key", "secret"]
    with servers.running(args, tmp_path_factory.mktemp("door") / "log", {"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/health", {}),
        ("HEAD", "/health", {}),
        ("GET", "/ping", {"accept": "*/*"}),
        ("POST", "/ping", {"content-length": "0"}),
        ("HEAD", "/metrics", KEY),
        ("GET", "/metrics", {"authorization": "Bearer wrong"}),
        ("GET", "/health?x=1", {}),
        ("GET", "/health", {"origin": "http://a.example"}),
        ("PUT", "/health", {}),
    ],
)
def test_both_answer_the_same(keyed: servers.Server, method: str, path: str, headers: dict[str, str]) -> None:
    """A connection that has asked for anything else is an API process's from then on."""
    with connected(keyed.port) as door, connected(keyed.port) as api:
        assert ask(api, "/v1/models", KEY)[0] == 200
        ours, theirs = ask(door, path, headers, method), ask(api, path, headers, method)
        if path == "/metrics" and method == "HEAD":
            for found in (ours, theirs):
                found[1].pop("content-length")
        assert ours == theirs


def test_the_figures_are_those_of_the_api_process(keyed: servers.Server) -> None:
    with connected(keyed.port) as door, connected(keyed.port) as api:
        assert ask(api, "/v1/models", KEY)[0] == 200
        texts = [ask(each, "/metrics", KEY)[2].decode() for each in (door, api)]
        names = [{line.partition(" ")[0] for line in text.splitlines() if not line.startswith("#")} for text in texts]
        assert names[0] - names[1] == set()
        assert {name for name in names[1] - names[0] if "/metrics" not in name} == set()
        assert "ferrule:event_loop_stall_seconds_count" in names[0]
    assert servers.until(lambda: "[launch access]" in keyed.text() and 'GET /metrics HTTP/1.1" 200' in keyed.text())
    assert "launch access] 127.0.0.1" in keyed.text()
    assert "key=key-1" in keyed.text()


def test_a_process_that_does_nothing_delays_no_probe(keyed: servers.Server) -> None:
    api = keyed.children()["api"]
    os.kill(api, signal.SIGSTOP)
    try:
        for _ in range(3):
            with connected(keyed.port) as door:
                assert ask(door, "/health", {})[0] == 200
                status, _, text = ask(door, "/metrics", KEY)
                assert (status, b"vllm:num_requests_running" in text) == (200, True)
    finally:
        os.kill(api, signal.SIGCONT)
    with connected(keyed.port) as connection:
        assert ask(connection, "/v1/models", KEY)[0] == 200


def test_https_has_a_port_for_probes(tiny_llama: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    with servers.own_port() as probes:
        args = [str(tiny_llama), *ARGS, "--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(pair.key)]
        args += ["--probe-port", str(probes)]
        with servers.started(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
            assert servers.until(lambda: _status(probes, "/health") == 200), server.text()
            assert _status(probes, "/metrics") == 200
            assert _status(probes, "/ping") == 200
            assert _status(probes, "/v1/models") == 404
            context = ssl.create_default_context(cafile=str(authority.cert))
            with connected(server.port, context) as connection:
                assert ask(connection, "/health", {})[0] == 200
                assert ask(connection, "/v1/models", {})[0] == 200
            assert server.stop() == 0


def _status(port: int, path: str) -> int:
    """0 without an answer."""
    with contextlib.suppress(OSError), connected(port) as connection:
        return ask(connection, path, {})[0]
    return 0
