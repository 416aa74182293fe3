"""A server of `ferrule serve` on a thread of this process, for tests of what goes over HTTP: processes of its own would
import again what the tests have imported, which takes most of the time of a start.

HTTP, service, engine and model are those of the command. What goes between service and engine is encoded and decoded as
for the socket of an engine's process. There is no launcher, no log file, and no signal.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from ferrule.api.server import HttpServer
from ferrule.client.inline import InlineClient
from ferrule.config import Resolved
from ferrule.config.parse import parse_command
from ferrule.frontend.service import build_service
from ferrule.hooks import open_hooks
from ferrule.launch.check import open_api
from ferrule.launch.prepare import prepare
from ferrule.llm.loop_thread import LoopThread
from ferrule.locate.localise import localise
from ferrule.plugin import Plugins, discover
from ferrule.wire.messages import FromEngine, ToEngine
from ferrule_plugins.command.serve import USAGE, sections, with_model
from ferrule_testkit.server import LIMITS

_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)


@dataclass(frozen=True)
class Here:
    """A server that runs in this process."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Client(InlineClient):
    """A client whose messages are bytes on their way, as between processes."""

    def _post(self, message: ToEngine) -> None:
        super()._post(_TO_ENGINE.decode(msgspec.msgpack.encode(message)))

    def _deliver(self, message: FromEngine) -> None:
        super()._deliver(_FROM_ENGINE.decode(msgspec.msgpack.encode(message)))


@contextmanager
def serving_here(args: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Here]:
    """Serve with the options of `ferrule serve` for the length of a block. `env` is as for `running`. Raises
    StartupError.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**LIMITS, **(env or {}), "FERRULE_CONFIGURE_LOGGING": "0"}.items():
            patch.setenv(name, value)
        parsed = parse_command(args, USAGE, discover(), sections=sections())
        assert parsed is not None
        config, plugins = prepare(with_model(parsed.config), parsed.notices, discover(), "launch")
    config = localise(config, plugins)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        thread = LoopThread("api")
        try:
            thread.wait(_serve(config, plugins, listener, thread.opened))
            yield Here(listener.getsockname()[1])
        finally:
            thread.close()


async def _serve(config: Resolved, plugins: Plugins, listener: socket.socket, opened: AsyncExitStack) -> None:
    hooks = open_hooks(plugins, config)
    client = _Client(config, plugins, checked=False)
    opened.push_async_callback(client.close)
    front, inputs = open_api(config, plugins, client.board, hooks)
    client.begin_loading()
    await client.wait_ready()
    service = build_service(config, plugins, client, hooks=hooks, inputs=inputs)
    opened.push_async_callback(service.close)
    service.start()
    front.lifecycle.ready(service)
    server = HttpServer(config, front)
    running = asyncio.create_task(server.serve(sockets=[listener]))

    async def end() -> None:
        server.should_exit = True
        await running

    opened.push_async_callback(end)
