"""Flags of the HTTP frame with the real command: CORS, middleware, keys, ids, load, comments, strictness, logs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ferrule.launch.cli import main
from ferrule_testkit import server as servers

ORIGIN = {"origin": "https://a.example"}
KEY = {"authorization": "Bearer user-key"}
ADMIN = {"authorization": "Bearer admin-key"}
LONG = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Hello", "max_tokens": 4}

MIDDLEWARE = """
import asyncio, time


class Stamp:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-class", b"1"))
            await send(message)

        await self.app(scope, receive, stamped)


async def hook(request, call_next):
    if request.headers.get("x-fail"):
        raise ValueError("a secret of the operator")
    response = await call_next(request)
    response.headers["x-function"] = request.url.path
    return response


def plain(request, call_next):
    return None


class Broken:
    def __init__(self, app):
        raise RuntimeError("it does not want to")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the middleware, to be imported from."""
    found = tmp_path_factory.mktemp("frame")
    (found / "frame_mw.py").write_text(MIDDLEWARE)
    return found


@pytest.fixture(scope="module")
def gate(folder: Path) -> servers.Gate:
    return servers.Gate(folder)


@pytest.fixture(scope="module")
def server(folder: Path, gate: servers.Gate) -> Iterator[servers.Server]:
    """Run one server with all the flags that go together. One sequence runs at a time, so that a second stream
    waits.
    """
    args = [
        *servers.WITHOUT_MODEL,
        "--allowed-origins",
        '["https://a.example"]',
        "--allowed-methods",
        '["GET", "POST"]',
    ]
    args += ["--allowed-headers", '["authorization", "content-type"]', "--allow-credentials"]
    args += ["--middleware", "frame_mw.hook", "--middleware", "frame_mw.Stamp", "--api-key", "user-key"]
    args += ["--admin-key", "admin-key", "--enable-request-id-headers", "--enable-server-load-tracking"]
    args += ["--sse-keepalive", "0.2", "--max-num-seqs", "1", "--uvicorn-log-level", "debug", *gate.args]
    env = {"PYTHONPATH": str(folder), "FERRULE_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
    with servers.running(args, folder / "log", env) as running:
        yield running


@pytest.fixture
def http(server: servers.Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as found:
        yield found


def error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == status
    return str(found["message"])


def events(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines without the comments that come when the first token takes long."""
    return (line for line in lines if line and line != ": ping")


# --------------------------------------------------------------------------------------------------- CORS


def test_preflight(http: httpx.Client) -> None:
    asked = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    found = http.options("/v1/chat/completions", headers=asked)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "https://a.example"
    assert found.headers["access-control-allow-credentials"] == "true"
    assert set(found.headers["access-control-allow-methods"].split(", ")) == {"GET", "POST"}
    for wrong in (
        {"origin": "https://b.example"},
        {"access-control-request-method": "DELETE"},
        {"access-control-request-headers": "x-mine"},
    ):
        refused = http.options("/v1/chat/completions", headers={**asked, **wrong})
        assert "--allowed-origins" in error(refused, 400)


def test_cors_headers_are_on_every_answer(http: httpx.Client) -> None:
    for path, headers, status in (("/health", {}, 200), ("/v1/models", {}, 401), ("/nowhere", KEY, 404)):
        found = http.get(path, headers={**ORIGIN, **headers})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, "https://a.example")
        assert "retry-after" in found.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in http.get("/health", headers={"origin": "https://b.example"}).headers


# --------------------------------------------------------------------------------------------- middleware


def test_middleware_sees_every_call_and_is_outside_the_gate(http: httpx.Client) -> None:
    for path, status in (("/health", 200), ("/v1/models", 401)):
        found = http.get(path)
        assert (found.status_code, found.headers["x-class"], found.headers["x-function"]) == (status, "1", path)


def test_middleware_does_not_hold_streams_back(http: httpx.Client, gate: servers.Gate) -> None:
    """Receive the first event while the answer is still being made."""
    wait_idle(http)
    with gate.shut(after=4), http.stream("POST", "/v1/completions", json=LONG, headers=KEY) as found:
        lines = events(found.iter_lines())  # held, or the stream is closed
        assert next(lines).startswith("data: {")
        assert http.get("/load", headers=KEY).json() == {"server_load": 1}
    wait_idle(http)  # leaving went through it, too


def test_a_failing_middleware_is_a_500_that_tells_nothing(http: httpx.Client, server: servers.Server) -> None:
    found = http.get("/health", headers={"x-fail": "1"})
    assert "secret" not in error(found, 500)
    assert server.says("a secret of the operator")


def test_what_is_no_middleware_stops_the_start(folder: Path) -> None:
    args = [*servers.WITHOUT_MODEL, *servers.FEW_ROUTES, "--host", "127.0.0.1", "--port", "0"]
    args += ["--middleware", "frame_mw.plain"]
    command = [sys.executable, "-m", "ferrule", "serve", *args]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder)
    assert found.returncode == 2
    assert "--middleware frame_mw.plain is a function" in found.stderr
    assert "Traceback" not in found.stderr


def test_what_the_engine_refuses_ends_the_start_in_one_block_with_the_status_of_a_dry_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["serve", "--kv-cache-memory-bytes", "1k"]
    command = [sys.executable, "-m", "ferrule", *args, "--host", "127.0.0.1", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    dry = main([*args, "--dry-run"])
    assert (found.returncode, dry) == (2, 2)
    for told, begins in ((found.stderr, "ferrule:"), (capsys.readouterr().err, "ferrule serve: error:")):
        block = told[told.index(begins) :]
        assert [line.split()[0] for line in block.splitlines() if line.strip()][1:][-1:] == ["Give"]
        assert "The KV cache has room for 0 tokens" in block


# --------------------------------------------------------------------------------------- keys, ids and load


def test_the_admin_key_is_the_only_one_for_admin_routes(http: httpx.Client) -> None:
    message = error(http.post("/reset_prefix_cache", headers=KEY), 401)
    assert "admin key" in message
    assert "Authorization: Bearer" in message
    error(http.get("/reset_prefix_cache", headers=KEY), 401)  # not even that it takes POST
    error(http.post("/reset_prefix_cache"), 401)
    assert "POST" in error(http.get("/reset_prefix_cache", headers=ADMIN), 405)
    assert http.post("/reset_prefix_cache", headers=ADMIN).status_code == 200
    error(http.get("/v1/models", headers=ADMIN), 401)
    assert http.get("/v1/models", headers=KEY).status_code == 200
    assert "Did you mean" not in error(http.post("/reset_prefix_caches", headers=KEY), 404)
    assert "Did you mean" not in error(http.post("/reset_prefix_cache/", headers=KEY), 404)


def test_request_ids_are_on_every_answer(http: httpx.Client) -> None:
    mine = {"x-request-id": "mine-1", **KEY}
    assert http.get("/v1/models", headers=mine).headers["x-request-id"] == "mine-1"
    assert http.get("/nowhere", headers=mine).headers["x-request-id"] == "mine-1"
    assert http.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.post("/v1/completions", content=b"{", headers=mine).headers["x-request-id"] == "mine-1"
    with http.stream("POST", "/v1/completions", json={**SHORT, "stream": True}, headers=mine) as found:
        assert found.headers["x-request-id"] == "mine-1"
        assert '"id":"cmpl-mine-1"' in next(events(found.iter_lines()))
    made = {http.get("/health", headers={"x-request-id": "not valid"}).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)


def wait_idle(http: httpx.Client) -> None:
    assert servers.until(lambda: http.get("/load", headers=KEY).json() == {"server_load": 0})


# ----------------------------------------------------------------------------------------------- comments


def test_a_stream_that_waits_gets_comments(http: httpx.Client, gate: servers.Gate) -> None:
    """Keep the second stream silent until the first has ended: one sequence runs at a time."""
    wait_idle(http)
    with gate.shut(after=4), http.stream("POST", "/v1/completions", json=LONG, headers=KEY) as first:
        running = events(first.iter_lines())
        assert next(running).startswith("data: {")
        with http.stream("POST", "/v1/completions", json={**SHORT, "stream": True}, headers=KEY) as second:
            lines = second.iter_lines()
            assert next(lines) == ": ping"
            assert http.get("/load", headers=KEY).json() == {"server_load": 2}
            gate.open()
            assert list(running)[-1] == "data: [DONE]"
            rest = list(events(lines))
    assert rest[0].startswith("data: {")
    assert rest[-1] == "data: [DONE]"


# --------------------------------------------------------------------------------- strictness, docs, logs


def test_strict_quiet_and_without_docs(tmp_path: Path) -> None:
    args = [
        *servers.WITHOUT_MODEL,
        "--strict-requests",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--sse-keepalive",
        "0",
    ]
    args += ["--routers", "openai", "health"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        with httpx.Client(base_url=server.url, timeout=240) as http:
            message = error(http.post("/v1/completions", json={**SHORT, "temprature": 1}), 400)
            assert "temprature" in message
            assert "'temperature'" in message
            found = http.post(
                "/v1/completions", json={**SHORT, "stream": True, "stream_options": {"include_usge": True}}
            )
            assert "'include_usage'" in error(found, 400)
            assert found.json()["error"]["param"] == "stream_options.include_usge"
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            for path in ("/docs", "/redoc", "/openapi.json"):
                error(http.get(path), 404)
            assert "router tokenize" in error(http.post("/tokenize", json={"prompt": "a"}), 404)
            assert "FERRULE_SERVER_DEV_MODE" not in error(http.post("/tokenise"), 404)
            assert http.get("/load").json() == {"server_load": 0}
        assert server.stop() == 0
        assert "HTTP/1.1" not in server.text()
        assert "/v1/completions HTTP" not in server.text()


def test_log_levels_of_the_http_server(server: servers.Server, http: httpx.Client, tmp_path: Path) -> None:
    http.get("/version")
    assert server.says('"GET /version HTTP/1.1" 200')
    args = [*servers.WITHOUT_MODEL, *servers.FEW_ROUTES, "--uvicorn-log-level", "warning"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as quiet:
        assert httpx.get(f"{quiet.url}/version", timeout=240).status_code == 200
        assert quiet.stop() == 0
        assert "HTTP/1.1" not in quiet.text()
        assert "uvicorn" not in quiet.text()
        assert quiet.says("ready at")


# ---------------------------------------------------------------------------------------------- error texts


@pytest.mark.parametrize(
    ("method", "path", "status", "what"),
    [
        (
            "POST",
            "/v1/embeddings",
            404,
            "POST /api/embed gives the vectors of texts; it needs task embed.",
        ),
        ("POST", "/v1/score", 404, "needs task score"),
        ("POST", "/v1/audio/transcriptions", 404, "needs task transcription"),
        ("POST", "/v1/audio/speech", 404, "Speech synthesis"),
        ("POST", "/v1/files", 404, "ferrule run-batch"),
        ("GET", "/v1/files/file-1/content", 404, "ferrule run-batch"),
        ("POST", "/v1/batches", 404, "ferrule run-batch"),
        ("POST", "/v1/images/generations", 404, "Image generation"),
        ("GET", "/v1/assistants", 404, "Assistants"),
        ("GET", "/v1", 404, "base URL"),
        ("GET", "/v1/models/", 404, "'/v1/models'"),
        ("POST", "//v1//completions", 404, "'/v1/completions'"),
        ("POST", "/v1/chat/completion", 404, "'/v1/chat/completions'"),
        ("POST", "/v1/v1/chat/completions", 404, "'/v1/chat/completions'"),
        ("GET", "/v1/models/nobody", 404, "ferrule-tiny"),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET, HEAD"),
        ("TRACE", "/health", 405, "GET, HEAD"),
    ],
)
def test_errors_say_what_would_be_right(http: httpx.Client, method: str, path: str, status: int, what: str) -> None:
    request = http.build_request(method, f"{str(http.base_url).rstrip('/')}{path}", headers=KEY)
    found = http.send(request)
    assert what in error(found, status)
    assert status != 405 or found.headers["allow"]


def test_wrong_bodies_say_what_would_be_right(http: httpx.Client) -> None:
    body = json.dumps(SHORT).encode()
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        found = http.post("/v1/completions", content=body, headers={**KEY, "content-type": kind})
        assert "application/json" in error(found, 400)
    found = http.post("/v1/completions", content=body, headers={**KEY, "content-encoding": "gzip"})
    assert "uncompressed" in error(found, 400)
    assert "Authorization: Bearer" in error(http.post("/v1/completions", content=body), 401)
