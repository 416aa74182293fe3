"""Serves HTTP in an API process: on a socket already bound, until a signal drains it or the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.lifespan.on import LifespanOn

from ferrule import log
from ferrule.api import tls
from ferrule.api.app import build_app
from ferrule.api.arrivals import AT_ONCE, SHARED, Arrivals
from ferrule.api.lifecycle import DEAD, Lifecycle
from ferrule.api.loop_guard import LoopGuard
from ferrule.api.protocol import protocol_class
from ferrule.api.reload import Reloads
from ferrule.config import Config
from ferrule.errors import EngineDead, FerruleError, StartupError, UnavailableError
from ferrule.hooks import HookRunner
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import Service
from ferrule.shared_memory.board import Board

Connect = Callable[[], Awaitable[Service]]

_WATCH_SECONDS = 0.2  # between two looks at the engine's health
_LAST_WORDS = 1.0  # seconds that a dead server answers 503 before it goes
_FLUSH = 3.0  # seconds to send the last errors and to close connections
_SHORT_FLUSH = 1.0  # the same after a second signal

_logger = log.get("api")


@dataclass(frozen=True)
class Front:
    """The HTTP side of an API process. `context` is its TLS context; None without TLS."""

    lifecycle: Lifecycle
    app: ASGIApp
    context: ssl.SSLContext | None
    reloads: Reloads = field(default_factory=Reloads)


def open_front(config: Config, plugins: Plugins, board: Board | None = None, hooks: HookRunner | None = None) -> Front:
    """Open routers, middleware and certificates; nothing listens yet.

    Raises ConfigError, and PluginError for routers that cannot be served.
    """
    lifecycle = Lifecycle(board)
    reloads = Reloads()
    app = build_app(config, plugins, lifecycle, hooks, reloads)
    if context := tls.context_of(config.frontend):
        reloads.add("certificates", lambda _: tls.reload(context, config.frontend))
    reloads.add("log levels of HTTP", _set_log_level)
    return Front(lifecycle, app, context, reloads)


async def serve(
    config: Config,
    front: Front,
    listener: socket.socket,
    connect: Connect,
    reread: Callable[[], Config] | None = None,
) -> int:
    """Serve until a signal or the engine's death, and return the process's exit status.

    The status is 0 for a clean end, 1 after the engine's death, and 128 + the signal when it came before the engine was
    ready, or a second signal cut the drain short.

    `connect` is awaited once, while the server already answers 503 "starting"; it returns the service when the engine
    is ready, and raises StartupError or EngineDead when that will never be. Raises what `connect` raised as
    StartupError. `reread` reads the configuration at SIGHUP; None: that signal keeps its meaning.
    """
    lifecycle, context = front.lifecycle, front.context
    stop = Stop()
    server = HttpServer(config, front)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    guard = LoopGuard(lifecycle.live.stalled, lambda: lifecycle.num_open > 0)
    lifecycle.stirred = guard.stir
    opening = asyncio.create_task(_open(connect, lifecycle))
    beside = [asyncio.create_task(_watch(opening, lifecycle))]
    if context and config.frontend.enable_ssl_refresh:
        beside.append(asyncio.create_task(tls.refresh(context, config.frontend)))
    try:
        with stop.on_signals(), front.reloads.on_hangup(reread) if reread else contextlib.nullcontext():
            await _first(stop.asked.wait(), lifecycle.died.wait(), asyncio.shield(running))
            # The launcher stops all processes at the same time, so an engine that ends while loading has not failed.
            early = stop.asked.is_set() and not lifecycle.live.attached
            if lifecycle.state == DEAD and not early:
                await _after_death(config, stop)
            else:
                await _drain(config, lifecycle, stop)
        lifecycle.cut(UnavailableError("The server is shutting down."))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(lifecycle.quiet(), _SHORT_FLUSH if stop.insisted.is_set() else _FLUSH)
    finally:
        for task in (*beside, opening):
            task.cancel()
        if not lifecycle.live.attached:  # why the start has failed, or was stopped, is what the log should end with
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        server.should_exit, server.force_exit = True, stop.insisted.is_set()
        guard.close()
        await running
    if early:
        return 128 + stop.number
    if opening.done() and not opening.cancelled() and isinstance(opening.exception(), StartupError):
        opening.result()
    if lifecycle.state == DEAD:
        return 1
    return 0 if lifecycle.live.attached and not stop.insisted.is_set() else 128 + stop.number


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory of event loops; None where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class Stop:
    """A stop by SIGTERM, SIGINT or SIGQUIT: the first signal sets `asked`, the second `insisted`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.number = 0  # of the last signal

    def signal(self, number: int) -> None:
        self.number = number
        (self.insisted if self.asked.is_set() else self.asked).set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
        for number in numbers:
            loop.add_signal_handler(number, self.signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers, with a time limit for TLS handshakes and turns for bursts."""

    def __init__(self, config: Config, front: Front) -> None:
        super().__init__(_uvicorn_config(config, front))
        self._at_once = SHARED if config.frontend.api_server_count > 1 else AT_ONCE
        limit = {"ssl_handshake_timeout": config.limits.header_timeout}
        self._tls: dict[str, Any] = {"ssl": front.context, **limit} if front.context else {}

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and end the lifespans of routers, which uvicorn leaves open where it is stopped early or in haste."""
        try:
            await super().serve(sockets)
        finally:
            lifespan = getattr(self, "lifespan", None)
            if isinstance(lifespan, LifespanOn) and not lifespan.shutdown_event.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lifespan.shutdown(), _SHORT_FLUSH)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise StartupError("The lifespan of a router has failed; the log above says how.")
        made: Callable[..., Any] = self.config.http_protocol_class
        state = self.lifespan.state
        protocol = functools.partial(made, config=self.config, server_state=self.server_state, app_state=state)
        self.servers = []
        for listener in sockets or ():
            arrivals = Arrivals(listener, self._at_once, self._tls)
            arrivals.open(protocol)
            self.servers.append(arrivals)  # type: ignore[arg-type]  # it is closed as the others are
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(config: Config, front: Front) -> uvicorn.Config:
    limits = config.limits
    _set_log_level(config)
    return uvicorn.Config(
        front.app,
        http=protocol_class(limits, front.lifecycle),
        ws="none",
        lifespan="auto",  # of routers; operators' middleware need not know of it
        log_config=None,
        access_log=False,  # the application writes its own, escaped
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive_timeout,
        timeout_graceful_shutdown=int(_FLUSH),
    )


async def _open(connect: Connect, lifecycle: Lifecycle) -> None:
    try:
        lifecycle.ready(await connect())
    except FerruleError as error:
        said = isinstance(error, (EngineDead, StartupError))  # by the engine's process, or by who gets this error
        (_logger.debug if said else _logger.error)("the engine did not start: %s", error)
        lifecycle.die("The engine did not start.")
        raise
    except Exception:
        _logger.exception("the engine could not be reached")
        lifecycle.die("The engine did not start.")


async def _watch(opening: asyncio.Task[None], lifecycle: Lifecycle) -> None:
    """Wait until the engine is ready, and then record its death when it comes."""
    await asyncio.wait([opening])
    while not lifecycle.died.is_set() and lifecycle.live.attached:
        if lifecycle.live.engine_health().state == DEAD:
            _logger.error("the engine is gone: open requests end with an error")
            lifecycle.die("The engine has stopped.")
        await asyncio.sleep(_WATCH_SECONDS)


async def _after_death(config: Config, stop: Stop) -> None:
    if config.env.keep_alive_on_engine_death:
        await stop.asked.wait()
    else:
        await asyncio.sleep(_LAST_WORDS)


async def _drain(config: Config, lifecycle: Lifecycle, stop: Stop) -> None:
    """Refuse new work, and give open exchanges their time, unless the engine dies or a second signal comes."""
    lifecycle.drain()
    if lifecycle.live.attached:
        _logger.info("draining", open=lifecycle.num_open, timeout=config.frontend.shutdown_timeout)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.frontend.shutdown_timeout):
            await _first(lifecycle.quiet(), lifecycle.died.wait(), stop.insisted.wait())


async def _first(*works: Awaitable[object]) -> None:
    """Wait for the first of several awaitables, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _set_log_level(config: Config) -> None:
    """Apply `--uvicorn-log-level`, unless a logging configuration file sets all levels."""
    level = logging.getLevelNamesMapping().get(config.frontend.uvicorn_log_level.upper(), 5)  # 5: uvicorn's trace
    for name in () if config.observability.log_config_file else ("uvicorn.error", "ferrule.access"):
        logging.getLogger(name).setLevel(level)
