"""The door with API processes that the test plays: sockets are real, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule.api.arrivals import Arrivals
from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config, FrontendConfig, LimitsConfig, StatSettings
from ferrule.config.resolve import resolve
from ferrule.door.door import Door
from ferrule.interfaces.stats import HttpStats
from ferrule.plugin import discover
from ferrule.wire.board import BEAT, READY, STATE, STATES, Board
from ferrule.wire.doorway import AT_ONCE, Answered, Doorway, Fresh, Loaded, Message, Offer, Probe, Refresh
from ferrule_plugins.stat_logger.prometheus import Prometheus
from ferrule_testkit.service import fake_model

PLUGINS = discover()
OFFER = Offer({"GET /health": Probe("health"), "GET /metrics": Probe("metrics")})
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE = 60.0


class Api:
    """An API process: what it was given, and what it was told."""

    def __init__(self, far_end: Doorway) -> None:
        self.doorway = Doorway(socket.socket(fileno=os.dup(far_end.fileno())))
        self.connections: list[socket.socket] = []
        self.messages: list[Message] = []
        self.refresh: Callable[[], None] | None = None

    def take(self, holds: Callable[[], object]) -> None:
        """Take what comes until a condition holds."""
        end = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self.doorway.fileno(), selectors.EVENT_READ)
            while not holds():
                assert time.monotonic() < end
                if not selector.select(0.1):
                    continue
                connections, message = self.doorway.receive()
                self.connections += connections
                if message is not None:
                    self.messages.append(message)
                if isinstance(message, Refresh) and self.refresh is not None:
                    self.refresh()
                    self.doorway.send(Fresh(message.number))

    @property
    def answered(self) -> list[HttpStats]:
        return [message.stats for message in self.messages if isinstance(message, Answered)]


class Running:
    def __init__(self, folder: Path, count: int = 1, **limits: float) -> None:
        front = FrontendConfig(api_server_count=count)
        self.config = resolve(Config(frontend=front, limits=LimitsConfig(**limits)))  # type: ignore[arg-type]
        board = Board.create(folder / "board", count)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.door = Door(self.config, PLUGINS, board, folder, [self.listener])
        self.apis = [Api(end) for end in self.door.far_ends]
        self.door.open()
        self.rows = [Board(folder / "board", row) for row in range(count + 1)]

    def ready(self) -> None:
        for row in self.rows:
            row.put(BEAT, time.monotonic())
            row.put(STATE, STATES.index("ready"))
        for row in self.rows[1:]:
            row.put(READY, 1.0)
        for api in self.apis:
            api.doorway.send(OFFER)
        while b" 200 " not in self.ask(HEALTH.replace(b"host", b"connection: close\r\nhost")):
            for api in self.apis:
                api.take(lambda: True)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.address, timeout=PATIENCE)
        client.sendall(data)
        return client

    def ask(self, data: bytes) -> bytes:
        """All that is answered before the connection closes; of what an API process would answer, nothing."""
        with self.connect(data) as client:
            client.settimeout(2.0)
            found = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                while piece := client.recv(1 << 16):
                    found += piece
            return found


@contextlib.contextmanager
def running(folder: Path, count: int = 1, **limits: float) -> Iterator[Running]:
    server = Running(folder, count, **limits)
    try:
        yield server
    finally:
        server.door.close()
        for api in server.apis:
            for each in (*api.connections, api.doorway):
                each.close()


def received(connections: Sequence[socket.socket]) -> list[bytes]:
    """What each of them has to say; nothing was read by the door."""
    found = []
    for connection in connections:
        connection.settimeout(PATIENCE)
        found.append(connection.recv(1 << 16))
    return found


def test_a_probe_is_answered_and_what_follows_is_handed_over(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.ready()
        (api,) = server.apis
        with server.connect(HEALTH) as client:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
            client.sendall(HEALTH + MODELS)
            assert client.recv(1 << 16).endswith(b'{"status":"ready"}')
            api.take(lambda: api.connections)
            assert received(api.connections) == [MODELS]
            api.connections[0].sendall(b"from the API")
            assert client.recv(64) == b"from the API"
        api.take(lambda: len(api.answered) >= 3)
        assert {(stats.route, stats.method, stats.status, stats.sent) for stats in api.answered} == {
            ("/health", "GET", 200, 18)
        }


def test_without_an_offer_everything_is_handed_over(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.connect(HEALTH), server.connect(b"GET /hea"):
        (api,) = server.apis
        api.take(lambda: len(api.connections) == 2)
        assert sorted(received(api.connections)) == [b"GET /hea", HEALTH]


def test_who_says_nothing_is_handed_over_and_who_leaves_is_not(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.connect().close()
        with server.connect() as client:
            (api,) = server.apis
            api.take(lambda: api.connections)
            client.sendall(b"late")
            assert received(api.connections) == [b"late"]


def test_processes_take_turns_and_the_last_one_ends_the_door(tmp_path: Path) -> None:
    with running(tmp_path, count=2) as server, contextlib.ExitStack() as stack:
        for number in range(8):
            stack.enter_context(server.connect(b"%d" % number))
            time.sleep(0.01)
        for api in server.apis:
            api.take(lambda api=api: len(api.connections) >= 3)
        server.apis[0].doorway.close()
        first = len(server.apis[1].connections)
        for _ in range(3):
            stack.enter_context(server.connect(MODELS))
        server.apis[1].take(lambda: len(server.apis[1].connections) >= first + 3)
        server.apis[1].doorway.close()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                server.connect(MODELS).close()
            except OSError:
                return
        pytest.fail("the door accepts for nobody")


def test_a_process_that_takes_nothing_leaves_probes_alone(tmp_path: Path) -> None:
    """Connections wait, up to a limit, and are there once it takes them."""
    with running(tmp_path, max_connections=40) as server, contextlib.ExitStack() as stack:
        server.ready()
        (api,) = server.apis
        clients = [stack.enter_context(server.connect(b"%4d" % number)) for number in range(400)]
        refused = 0
        assert b" 200 " in server.ask(HEALTH.replace(b"host", b"connection: close\r\nhost"))
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                refused += client.recv(1 << 10).startswith(b"HTTP/1.1 503 ")
        taken = len(clients) - refused
        api.take(lambda: len(api.connections) == taken)
        assert len({data for data in received(api.connections) if len(data) == 4}) == taken
        assert taken >= 40


def test_metrics_are_shown_though_the_process_does_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.ready()
        (api,) = server.apis
        logger = Prometheus(StatSettings.of(server.config), fake_model())
        logger.share(tmp_path, 0)
        api.doorway.send(Loaded(fake_model()))
        logger.on_http(HttpStats(route="/x", method="GET", status=200, seconds=0.1, received=0, sent=1))
        text = b""
        while b"http_requests_total" not in text:  # until then it is handed over
            text = server.ask(METRICS)
        assert b'http_requests_total{handler="/x",method="GET",status="2xx"} 1.0' in text
        assert b"process_open_fds " in text
        assert b"python_gc_collections_total" in text


def test_metrics_are_the_newest_of_a_process_that_answers(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.ready()
        (api,) = server.apis
        logger = Prometheus(StatSettings.of(server.config), fake_model())
        logger.share(tmp_path, 0)
        api.doorway.send(Loaded(fake_model()))
        api.refresh = lambda: logger.on_stall(0.3)
        while b"event_loop_stall_seconds_count" not in (text := server.ask(METRICS)):
            pass
        before = len([message for message in api.messages if isinstance(message, Refresh)])
        with server.connect(METRICS) as client:
            api.take(lambda: len([m for m in api.messages if isinstance(m, Refresh)]) > before)
            while piece := client.recv(1 << 16):
                text += piece
        assert text.count(b"HTTP/1.1 200 OK") == 2


def test_a_message_has_room_for_many_connections() -> None:
    ours, theirs = Doorway.pair()
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(AT_ONCE)]
        for each in [*sum(pairs, ()), ours, theirs]:
            stack.callback(each.close)
        assert ours.hand([one for one, _ in pairs])
        connections, message = theirs.receive()
        assert len(connections) == AT_ONCE
        assert message is None
        for connection in connections:
            assert not connection.get_inheritable()
            connection.close()
        with pytest.raises(BlockingIOError):
            theirs.receive()
        theirs.close()
        assert not ours.send(Refresh(1))
        with pytest.raises(OSError):
            ours.hand([pairs[0][0]])


def test_a_connection_is_handed_over_though_the_system_had_no_room_for_it_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = socket.send_fds, [errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM]

    def send_fds(*args: Any, **more: Any) -> int:
        if errors:
            raise OSError(errors.pop(), "none")
        return real(*args, **more)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    with running(tmp_path) as server, server.connect(MODELS):
        (api,) = server.apis
        api.take(lambda: api.connections)
        assert received(api.connections) == [MODELS]
        assert not errors


async def test_a_process_that_gets_no_more_connections_is_told_once() -> None:
    ours, theirs = Doorway.pair()
    lost = asyncio.Queue[None]()
    arrivals = Arrivals(theirs, Lifecycle(), lambda: lost.put_nowait(None))
    arrivals.open(asyncio.Protocol)
    ours.close()
    await asyncio.wait_for(lost.get(), PATIENCE)
    await asyncio.sleep(0.05)
    assert lost.empty()
    arrivals.close()
