"""The server on a real socket: limits of the connection, drain, death. The service is scripted; times are short."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import APIRouter, Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ferrule.api import server as api_server
from ferrule.api.intake import Intake
from ferrule.api.lifecycle import Exchange, Lifecycle
from ferrule.api.protocol import GuardedProtocol
from ferrule.api.server import open_front, serve
from ferrule.config import Config, FrontendConfig, LimitsConfig
from ferrule.env import Environment
from ferrule.errors import CheckpointError, EngineDead, StartupError, UnavailableError
from ferrule.interfaces.parsers import Content
from ferrule.interfaces.router import Router, RouterContext
from ferrule.interfaces.service import Output, Service
from ferrule.plugin import discover
from ferrule.shared_memory.board import BUFFERED
from ferrule.types import FinishReason
from ferrule_testkit.service import ScriptedService
from tests.unit.api.test_app import FakePlugins

PLUGINS = discover()
BODY = json.dumps({"prompt": "hello"}).encode()
STREAM = {"prompt": "hello", "stream": True}


def client(port: int) -> httpx.AsyncClient:
    """Return a client without certificates: all that the system has would be read for each client."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240, verify=False)


class Running:
    def __init__(self, port: int, service: ScriptedService, task: asyncio.Task[int], lifecycle: Lifecycle) -> None:
        self.port = port
        self.lifecycle = lifecycle
        self.service = service
        self.task = task
        self.http = client(port)

    async def raw(self, data: bytes, then: Callable[[], Awaitable[None]] | None = None) -> bytes:
        """Send bytes, read until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        if then is not None:
            await then()
        try:
            return await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()

    async def stopped(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(self.task, 120)


@asynccontextmanager
async def running(connect: Any = None, env: Environment | None = None, **values: Any) -> AsyncIterator[Running]:
    limits = values.pop("limits", {})
    front = FrontendConfig(**{"routers": ("openai", "health")} | values)
    config = Config(frontend=front, limits=LimitsConfig(**limits), env=env or Environment())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    service = ScriptedService()

    async def ready() -> Service:
        return service

    opened = open_front(config, PLUGINS)
    task = asyncio.create_task(serve(config, opened, listener, connect or ready))
    server = Running(port, service, task, opened.lifecycle)
    try:
        while True:
            if task.done():
                break
            try:
                if connect is not None or (await server.http.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.01)
        yield server
    finally:
        await server.http.aclose()
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, 120)


def status_of(answer: bytes) -> int:
    assert answer.count(b"HTTP/1.1 ") == 1, answer[:300]
    return int(answer[9:12])


def error_of(answer: bytes) -> dict[str, Any]:
    found = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == status_of(answer)
    return dict(found)


# ------------------------------------------------------------------------------------------ raw HTTP

POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
ODD_HOSTS = (b"", b"a b", b"a/b", b"a@b", b"a:b", b"a:123456", b"a, b", b"[::1", b"http://a", b"\xe4")


MALFORMED = [
    (b"NONSENSE\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n", 400),
    (b"GET /health HTTP/3.7\r\n\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"GET /caf\xc3\xa9?x=\xff HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\nx: " + b"a" * 400_000, 431),
    (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
    (
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde", 400),
    (POST + b"content-length: -5\r\n\r\n", 400),
    (POST + b"content-length: 99999999999\r\n\r\n{", 413),
    (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"GET /health HTTP/1.0\r\n\r\n", 200),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
    *((b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % host, 400) for host in ODD_HOSTS),
    (b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n", 505),
    (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    (
        POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
]


@pytest.mark.advisory("PYSEC-2026-2305", "CVE-2025-48956", "CVE-2025-43859")
async def test_malformed_and_oversized_requests() -> None:
    async with running() as server:
        for data, status in MALFORMED:
            answer = await server.raw(data)
            assert (data[:100], status_of(answer)) == (data[:100], status)
            if status != 200:
                error_of(answer)
            assert (await server.http.get("/health")).status_code == 200


@pytest.mark.advisory("CVE-2025-43859")
async def test_endless_trailers_are_cut() -> None:
    async with running() as server:
        head = POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: "
        assert status_of(await server.raw(head + b"a" * 300_000)) == 431
        assert (await server.http.get("/health")).status_code == 200


TRAILERS = [
    (b"", 401),
    (b"authorization: Bearer secret\r\n", 401),
    (b"content-type: text/plain\r\ncontent-encoding: gzip\r\nx-request-id: mine\r\norigin: http://b\r\n", 200),
    (b"host: b\r\nexpect: 100-continue\r\nx-http-method-override: GET\r\n", 200),
    (b"Connection: close\r\n", 400),
    (b"connection: upgrade\r\nupgrade: websocket\r\n", 400),
    (b"content-length: 5\r\n", 400),
    (b"transfer-encoding: chunked\r\n", 400),
]


async def test_trailers_are_no_headers_of_the_request() -> None:
    """Ignore trailers whether they come with the head or behind it; refuse those that concern the framing."""
    after = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    async with running(api_key=("secret",), enable_request_id_headers=True) as server:
        for (trailers, status), packets in itertools.product(TRAILERS, (1, 2)):
            key = b"authorization: Bearer secret\r\n" if status != 401 else b""
            data = POST + key + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            body = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(BODY), BODY, trailers)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for piece in (data + body + after,) if packets == 1 else (data, body + after):
                writer.write(piece)
                await asyncio.sleep(0.05 * (packets - 1))
            answers = await asyncio.wait_for(reader.read(), 120)
            writer.close()
            assert (trailers, packets, int(answers[9:12])) == (trailers, packets, status)
            assert b"x-request-id: mine" not in answers.lower()
            assert answers.count(b"HTTP/1.1 ") == (2 if status == 200 else 1)


@pytest.mark.parametrize("how", ["answered", "left", "refused", "late", "cut"])
async def test_no_cycle_keeps_a_call_that_is_over(how: str) -> None:
    """Count objects without the collector: what a finished call read is free at once."""

    def alive() -> int:
        return sum(type(each) in (Exchange, Intake, RequestResponseCycle) for each in gc.get_objects())

    head = POST + b"content-length: 1000000\r\n\r\n"
    async with running(limits={"body_timeout": 0.2} if how == "late" else {}) as server:
        gc.collect()
        gc.freeze()  # what other tests left is not looked through: it is a million objects
        gc.disable()
        try:
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                if how == "answered":
                    writer.write(head_of(BODY) + BODY)
                else:
                    writer.write(head + (b"]" if how == "refused" else b'{"prompt": "' + b"a" * 100_000))
                await asyncio.sleep(0.05)
                if how == "cut":
                    server.lifecycle.cut(EngineDead("The engine has stopped."))
                if how == "late":
                    await asyncio.sleep(0.3)
                writer.close()
            for _ in range(100):
                if not alive():
                    break
                await asyncio.sleep(0.05)
            assert not alive()
        finally:
            gc.enable()


@pytest.mark.advisory("CVE-2025-48956")
async def test_slow_headers_are_cut_and_others_are_not() -> None:
    async with running(limits={"header_timeout": 0.2}) as server:
        late = b"GET /health HTTP/1.1\r\nhost"
        assert status_of(await server.raw(late)) == 408
        assert status_of(await server.raw(b"")) == 408
        release = asyncio.Event()
        server.service.pace = release.wait
        call = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "hello"}))
        while not server.service.open:
            if call.done():  # even its headers were late: the machine is busy
                assert call.result().status_code == 408
                call = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "hello"}))
            await asyncio.sleep(0.01)
        assert status_of(await server.raw(late)) == 408  # so the time for headers is over
        assert not call.done()
        release.set()
        assert (await call).status_code == 200


async def test_a_refused_body_still_gets_its_answer() -> None:
    async with running(limits={"max_body_bytes": 1000}) as server:
        for _ in range(5):
            response = await server.http.post("/v1/completions", content=b" " * 4_000_000)
            assert response.status_code == 413
            assert response.headers["connection"] == "close"


async def test_too_many_connections_are_told() -> None:
    async with running(limits={"max_connections": 3}) as server:
        await server.http.aclose()
        writers = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(3)]
        answer = await server.raw(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")  # accepted after them
        assert status_of(answer) == 503
        for writer in writers:
            writer.close()
        server.http = client(server.port)
        while (await server.raw(b"GET /health HTTP/1.0\r\n\r\n"))[9:12] != b"200":
            await asyncio.sleep(0.02)


async def test_a_reader_that_stops_is_cut() -> None:
    async with running(limits={"write_timeout": 0.3}) as server:
        server.service.rules = _wide(server.service)
        body = json.dumps({"prompt": [65] * 4000, "max_tokens": 4000, "logprobs": 20, "stream": True}).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        head = POST + b"content-type: application/json\r\n"
        await loop.sock_sendall(sock, head + b"content-length: %d\r\n\r\n" % len(body) + body)
        while not server.service.requests:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(120):
            while server.service.open:
                await asyncio.sleep(0.05)
        sock.close()


def _wide(service: ScriptedService) -> Any:
    import msgspec

    return msgspec.structs.replace(service.rules, max_model_len=10_000, context=10_000)


@pytest.mark.advisory("CVE-2026-9540")
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_ends_the_request(stream: bool) -> None:
    async with running() as server:
        server.service.pace = asyncio.Event().wait
        body = json.dumps({"prompt": "hello", "stream": stream}).encode()
        head = POST + b"content-length: %d\r\n\r\n" % len(body)
        for how in ("close", "reset", "half", "pipelined"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write((head + body) * (2 if how == "pipelined" else 1))
            async with asyncio.timeout(120):
                while not server.service.open:
                    await asyncio.sleep(0.01)
            if how == "reset":
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how == "half":
                writer.write_eof()
            else:
                writer.close()
            async with asyncio.timeout(120):
                while server.service.open:
                    await asyncio.sleep(0.01)
            writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running() as server:
        one = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        answer = await server.raw(one + one + b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert answer.rindex(b"version") > answer.rindex(b"text_completion")


async def test_hosts_that_clients_send() -> None:
    head = b"GET /health HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n"
    async with running() as server:
        for host in (b"a", b"a.b:80", b"127.0.0.1:8000", b"[::1]:8000", b"[fe80::1]", b"a_b", b"a:"):
            assert (host, status_of(await server.raw(head % host))) == (host, 200)


async def test_a_flood_of_pipelined_requests_gets_some_answers_and_is_told_where_they_end() -> None:
    async with running() as server:
        for one in (b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n", head_of(BODY) + BODY):
            answer = await server.raw(one * 2000)
            statuses = re.findall(rb"HTTP/1.1 (\d+) ", answer)
            assert set(statuses) == {b"200"}
            assert len(statuses) == 9
            assert answer.count(b"connection: close") == 1
            assert answer.rindex(b"connection: close") > answer.rindex(b"HTTP/1.1 200")


# ------------------------------------------------------------------------------------------ memory


def head_of(body: bytes) -> bytes:
    return POST + b"content-length: %d\r\n\r\n" % len(body)


async def emptied(server: Running) -> None:
    async with asyncio.timeout(120):
        while server.lifecycle.board.get(BUFFERED) or server.lifecycle.num_open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["200", "stream", "400", "gone", "slow", "drain"])
@pytest.mark.parametrize("size", [100, 3 << 20])
async def test_nothing_is_counted_after_any_end_of_an_exchange(end: str, size: int) -> None:
    async with running(limits={"body_timeout": 0.3 if end == "slow" else 60.0}) as server:
        prompt = {"prompt": "a", "stream": end == "stream", "unknown": "a" * size}
        body = json.dumps(prompt | ({"n": "x"} if end == "400" else {})).encode()
        if end in ("200", "stream", "400"):
            answer = await server.http.post("/v1/completions", content=body)
            assert answer.status_code == (400 if end == "400" else 200)
        else:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head_of(body) + body[:-1])
            async with asyncio.timeout(120):
                while not server.lifecycle.num_open or (size > 100 and server.lifecycle.board.get(BUFFERED) < size):
                    await asyncio.sleep(0.01)
            if end == "gone":
                writer.transport.abort()
            if end == "drain":
                server.lifecycle.cut(UnavailableError("The server is shutting down."))
        await emptied(server)


async def test_bodies_get_room_one_after_the_other_and_stalled_ones_are_ended() -> None:
    """Accept twelve bodies of 3 MiB where there is room for four: none is refused, except those that stop on the
    way.
    """
    async with running(limits={"max_buffered_bytes": 34 << 20}) as server:
        body = json.dumps({"prompt": "a", "unknown": "a" * (3 << 20)}).encode()
        stalled = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        for _, writer in stalled:
            writer.write(head_of(body) + body[: 2 << 20])
        async with asyncio.timeout(120):
            while server.lifecycle.board.get(BUFFERED) < 4 * 2 * len(body):
                await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(server.http.post("/v1/completions", content=body) for _ in range(12)))
        assert {answer.status_code for answer in answers} == {200}
        ended = [await reader.read() for reader, _ in stalled]
        assert [status_of(answer) for answer in ended] == [408] * 4
        await emptied(server)


async def test_a_body_that_can_never_fit_is_refused_before_it_is_read() -> None:
    async with running(limits={"max_buffered_bytes": 1 << 20}) as server:
        body = json.dumps({"prompt": "a", "unknown": "a" * (3 << 20)}).encode()
        answer = await server.raw(head_of(body) + body)
        assert status_of(answer) == 413
        assert "--max-buffered-bytes" in error_of(answer)["message"]
        await emptied(server)


async def test_white_space_is_refused_long_before_its_end() -> None:
    async with running() as server:
        answer = await server.raw(head_of(b" " * (30 << 20)) + b" " * (1 << 18))
        assert status_of(answer) == 400
        assert "white space" in error_of(answer)["message"]


async def test_a_large_answer_waits_for_its_reader_and_is_counted_meanwhile() -> None:
    async with running() as server:
        text = "word " * 4_000_000
        answer = Output(index=0, events=(Content(text),), token_ids=(1,), finish=FinishReason.LENGTH)
        server.service.script = lambda request, index, ids: [answer]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(head_of(BODY) + BODY)
        async with asyncio.timeout(120):
            while server.lifecycle.board.get(BUFFERED) < 16 << 20:
                await asyncio.sleep(0.01)
        found = [one.transport for one in gc.get_objects() if isinstance(one, GuardedProtocol) and one.transport]
        assert max(transport.get_write_buffer_size() for transport in found) < 256 << 10
        writer.transport.abort()
        await emptied(server)


# ------------------------------------------------------------------------------------------ states


async def first_health(server: Running) -> int:
    """Return the status of /health as soon as somebody answers."""
    async with asyncio.timeout(120):
        while True:
            try:
                return (await server.http.get("/health")).status_code
            except httpx.TransportError:
                await asyncio.sleep(0.01)


async def test_starting_then_ready_then_stopped() -> None:
    gate = asyncio.Event()
    service = ScriptedService()

    async def connect() -> Service:
        await gate.wait()
        return service

    async with running(connect) as server:
        assert await first_health(server) == 503
        assert (await server.http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        gate.set()
        async with asyncio.timeout(120):
            while (await server.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
        assert await server.stopped() == 0


async def test_stop_while_starting() -> None:
    async with running(asyncio.Event().wait) as server:
        assert await first_health(server) == 503
        assert await server.stopped() == 128 + signal.SIGTERM


async def test_an_engine_that_ends_with_the_signal_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine end in the turn of the process's own signal: the launcher stops both at once."""
    gone = asyncio.Event()
    note = api_server.Stop.signal

    def signal_both(stop: api_server.Stop, number: int) -> None:
        note(stop, number)
        gone.set()

    async def connect() -> Service:
        await gone.wait()
        raise CheckpointError("the engine was stopped while it was loading")

    monkeypatch.setattr(api_server.Stop, "signal", signal_both)
    async with running(connect) as server:
        assert await first_health(server) == 503
        assert await server.stopped() == 128 + signal.SIGTERM


async def test_an_engine_that_cannot_start_ends_the_server() -> None:
    async def connect() -> Service:
        raise CheckpointError("model.safetensors is damaged.")

    async with running(connect) as server:
        with pytest.raises(CheckpointError, match="damaged"):
            await asyncio.wait_for(server.task, 120)


async def test_drain_lets_streams_finish_and_refuses_new_work() -> None:
    async with running() as server:
        release = asyncio.Event()
        server.service.pace = release.wait
        async with server.http.stream("POST", "/v1/completions", json=STREAM) as stream:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(120):
                while (await server.http.get("/health")).status_code != 503:
                    await asyncio.sleep(0.01)
            refused = await server.http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            release.set()
            text = (await stream.aread()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(server.task, 120) == 0


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    async with running(shutdown_timeout=0.2) as server:
        server.service.pace = asyncio.Event().wait
        async with server.http.stream("POST", "/v1/completions", json=STREAM) as stream:
            os.kill(os.getpid(), signal.SIGTERM)
            text = (await stream.aread()).decode()
        assert '"code":503' in text
        assert "[DONE]" not in text
        assert await asyncio.wait_for(server.task, 120) == 0


async def test_a_second_signal_does_not_wait() -> None:
    async with running(shutdown_timeout=1000) as server:
        server.service.pace = asyncio.Event().wait
        async with server.http.stream("POST", "/v1/completions", json=STREAM) as stream:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(120):
                while (await server.http.get("/health")).status_code != 503:
                    await asyncio.sleep(0.01)
            assert not server.task.done()
            os.kill(os.getpid(), signal.SIGINT)
            assert "[DONE]" not in (await stream.aread()).decode()
        assert await asyncio.wait_for(server.task, 120) == 128 + signal.SIGINT


async def test_death_of_the_engine_ends_streams_and_the_server() -> None:
    async with running() as server:
        server.service.pace = asyncio.Event().wait
        whole = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "hello"}))
        async with server.http.stream("POST", "/v1/completions", json=STREAM) as stream:
            while server.service.open < 2:
                await asyncio.sleep(0.01)
            server.service.state = "dead"
            text = (await stream.aread()).decode()
        assert '"code":503' in text
        assert "[DONE]" not in text
        assert (await whole).status_code == 503
        assert await asyncio.wait_for(server.task, 120) == 1


async def test_a_dead_engine_can_be_outlived() -> None:
    async with running(env=Environment(keep_alive_on_engine_death=True)) as server:
        server.service.state = "dead"
        async with asyncio.timeout(120):
            while "dead" not in (await server.http.get("/health")).text:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        assert (await server.http.get("/health")).status_code == 503
        assert await server.stopped() == 1


class Alive(Router):
    """A router with a lifespan, which notes how far it has come."""

    seen: ClassVar[list[str]] = []
    fails: ClassVar[bool] = False

    def router(self, ctx: RouterContext) -> APIRouter:
        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[dict[str, str]]:
            if self.fails:
                raise OSError("no such database")
            self.seen.append("begun")
            yield {"greeting": "hello"}
            self.seen.append("ended")

        routes = APIRouter(lifespan=lifespan)

        @routes.get("/greeting")
        async def greeting(request: Request) -> str:
            return str(request.state.greeting)

        return routes


async def test_the_lifespan_of_a_router_lasts_as_long_as_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alive, "seen", [])
    monkeypatch.setattr(f"{__name__}.PLUGINS", FakePlugins(alive=Alive))
    async with running(routers=("alive", "health")) as server:
        assert (await server.http.get("/greeting")).json() == "hello"
        assert Alive.seen == ["begun"]
    assert Alive.seen == ["begun", "ended"]


async def test_a_lifespan_that_fails_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alive, "fails", True)
    monkeypatch.setattr(f"{__name__}.PLUGINS", FakePlugins(alive=Alive))

    async def connect() -> Service:
        return ScriptedService()

    async with running(connect=connect, routers=("alive", "health")) as server:
        with pytest.raises(StartupError, match="lifespan of a router"):
            await server.task
