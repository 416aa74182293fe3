"""The benchmark of the HTTP edge: its client, and how its figures are combined."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools.benchmarks import edge


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400 if body == b"wrong" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1])
        self.wfile.flush()
        self.wfile.write(body[1:])

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.parametrize(("body", "status"), [(b"right" * 50_000, 200), (b"wrong", 400)])
def test_the_client_waits_for_whole_answers(body: bytes, status: int) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seconds, found = edge.drive(server.server_port, edge.request_bytes("/", body), clients=3, count=7)
        server.shutdown()
    assert (len(seconds), found) == (7, status)
    assert min(seconds) > 0


def test_rounds_alternate_and_their_median_counts() -> None:
    asked: list[str] = []
    servers = [edge.Server("old", 1, None, 0.0), edge.Server("new", 2, None, 0.0)]  # type: ignore[arg-type]

    def measure(server: edge.Server) -> dict[str, float]:
        asked.append(server.python)
        return {"ms": float(len(asked) ** server.port)}

    found = edge.in_turns(servers, measure, 3)
    assert asked == ["new", "old", "old", "new", "new", "old"]
    assert found == [{"ms": 3.0}, {"ms": 16.0}]


def test_the_ratio_is_that_of_the_last_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    edge.show("chat", [{"p50 ms": 2.0}, {"p50 ms": 3.0}])
    assert capsys.readouterr().out.split() == ["chat", "p50", "ms", "2.00", "3.00", "x", "1.50"]
