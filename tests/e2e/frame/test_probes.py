"""`--probe-port` with the real command: answered as API processes answer, and also when those do nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ferrule_testkit import server as servers

ARGS = [*servers.WITHOUT_MODEL, "--num-gpu-blocks-override", "64"]
KEY = {"authorization": "Bearer secret"}
Answer = tuple[int, dict[str, str], bytes]


def ask(connection: http.client.HTTPConnection, path: str, headers: dict[str, str], method: str = "GET") -> Answer:
    """Return status, headers and body, without what differs from one answer to the next."""
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


@dataclass(frozen=True)
class Keyed:
    server: servers.Server
    probes: int  # the port
    keys: Path


@pytest.fixture(scope="module")
def keyed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("probes")
    keys = folder / "keys"
    keys.write_text("first: secret\n")
    with servers.own_port() as probes:
        args = [str(tiny_llama), *ARGS, "--api-key-file", str(keys), "--probe-port", str(probes)]
        with servers.running(args, folder / "log", {"OMP_NUM_THREADS": "1"}) as server:
            assert servers.until(lambda: _status(probes, "/health") == 200), server.text()
            yield Keyed(server, probes, keys)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/health", {}),
        ("HEAD", "/health", {}),
        ("GET", "/ping", {"accept": "*/*"}),
        ("POST", "/ping", {"content-length": "0"}),
        ("HEAD", "/metrics", KEY),
        ("GET", "/metrics", {"authorization": "Bearer wrong"}),
        ("GET", "/metrics", {}),
        ("GET", "/version", {}),
        ("GET", "/load", KEY),
        ("GET", "/health?x=1", {}),
        ("GET", "/health", {"origin": "http://a.example"}),
        ("PUT", "/health", {}),
    ],
)
def test_both_ports_answer_the_same(keyed: Keyed, method: str, path: str, headers: dict[str, str]) -> None:
    with connected(keyed.probes) as probes, connected(keyed.server.port) as main:
        ours, theirs = ask(probes, path, headers, method), ask(main, path, headers, method)
        if path == "/metrics" and method == "HEAD":
            for found in (ours, theirs):
                found[1].pop("content-length")
        assert ours == theirs


def test_the_probe_port_answers_nothing_else(keyed: Keyed) -> None:
    with connected(keyed.probes) as probes:
        assert ask(probes, "/v1/models", KEY)[0] == 404
        assert ask(probes, "/v1/completions", KEY, "POST")[0] == 404


def test_the_figures_are_those_of_the_api_process(keyed: Keyed) -> None:
    def figures(port: int) -> dict[str, str]:
        with connected(port) as connection:
            lines = ask(connection, "/metrics", KEY)[2].decode().splitlines()
        return dict(line.split(" ")[:2] for line in lines if not line.startswith("#"))

    def models() -> str:
        return figures(keyed.probes).get('http_requests_total{handler="/v1/models",method="GET",status="2xx"}', "0")

    with connected(keyed.server.port) as main:
        assert ask(main, "/v1/models", KEY)[0] == 200
    assert servers.until(lambda: float(models()) > 0)  # they may be a second old
    assert figures(keyed.probes).keys() <= figures(keyed.server.port).keys()
    assert "ferrule:event_loop_stall_seconds_count" in figures(keyed.probes)


def test_a_process_that_does_nothing_delays_no_probe(keyed: Keyed) -> None:
    api = keyed.server.children()["api"]
    os.kill(api, signal.SIGSTOP)
    try:
        for _ in range(3):
            with connected(keyed.probes) as probes:
                assert ask(probes, "/health", {})[0] == 200
                status, _, text = ask(probes, "/metrics", KEY)
                assert (status, b"vllm:num_requests_running" in text) == (200, True)
    finally:
        os.kill(api, signal.SIGCONT)
    with connected(keyed.server.port) as connection:
        assert ask(connection, "/v1/models", KEY)[0] == 200


def test_keys_are_reloaded_on_both_ports(keyed: Keyed) -> None:
    keyed.keys.write_text("first: secret\nother: second\n")
    second = {"authorization": "Bearer second"}
    with connected(keyed.probes) as probes:
        assert ask(probes, "/metrics", second)[0] == 401
    keyed.server.process.send_signal(signal.SIGHUP)
    for port in (keyed.probes, keyed.server.port):
        assert servers.until(lambda port=port: _status(port, "/metrics", second) == 200)


def _status(port: int, path: str, headers: dict[str, str] | None = None) -> int:
    """Return the status of an answer; 0 without one."""
    with contextlib.suppress(OSError), connected(port) as connection:
        return ask(connection, path, headers or {})[0]
    return 0
