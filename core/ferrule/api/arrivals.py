"""Connections that the launcher's door hands over, in the place of a listening socket.

A burst has its turns: `Lifecycle.at_once` says how many connections are taken in one of the event loop, so that what
runs already goes on between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

from ferrule.api.lifecycle import Lifecycle
from ferrule.config import Config
from ferrule.errors import FerruleError
from ferrule.hooks import HookRunner
from ferrule.wire.doorway import AT_ONCE, Answered, Doorway, Fresh, Message, Offer, Probe, Refresh

_RENEWED = 1.0  # seconds between two looks at what is offered

MakeProtocol = Callable[[], asyncio.Protocol]


class Arrivals:
    """uvicorn's view of a server: what `open` begins, `close` ends. `on_lost` is called when no connection will come
    any more."""

    def __init__(self, doorway: Doorway, lifecycle: Lifecycle, on_lost: Callable[[], None]) -> None:
        self._doorway = doorway
        self._lifecycle = lifecycle
        self._on_lost = on_lost
        self._offer: Offer | None = None  # the last one that was sent
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, make_protocol: MakeProtocol) -> None:
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._doorway.fileno(), self._on_readable)
        self._renew()

    def close(self) -> None:
        """Take no more connections; those that were not taken are closed."""
        self._renewal.cancel()
        self._loop.remove_reader(self._doorway.fileno())
        self._doorway.close()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: uvicorn waits for the connections."""

    def _renew(self) -> None:
        """Say what is offered, and again when it has changed: files of keys may be read again."""
        offer = self._lifecycle.offer()
        if offer != self._offer and self._doorway.send(offer):
            self._offer = offer
        self._renewal = self._loop.call_later(_RENEWED, self._renew)

    def _on_readable(self) -> None:
        for _ in range(self._lifecycle.at_once() // AT_ONCE):
            if not self._receive():
                return

    def _receive(self) -> bool:
        """Take one message; False when there is none."""
        try:
            connections, message = self._doorway.receive()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # the launcher has died, or has given up the door or this process
            self._loop.remove_reader(self._doorway.fileno())
            self._on_lost()
            return False
        for connection in connections:
            task = self._loop.create_task(self._take(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if message is not None:
            self._on_message(message)
        return True

    async def _take(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has left
            connection.close()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Answered):
            self._lifecycle.live.answered(message.stats)
        elif isinstance(message, Refresh):
            with contextlib.suppress(FerruleError):  # not ready
                self._lifecycle.service.report()
            self._doorway.send(Fresh(message.number))


def offered(probes: Mapping[str, Probe], config: Config, hooks: HookRunner) -> Mapping[str, Probe]:
    """What the door may answer: nothing that an operator's middleware must see, or that a plugin's hook decides on."""
    if config.frontend.middleware:
        return {}
    asked, adds = hooks.has("authorise"), hooks.has("register_metrics")
    return {
        call: probe
        for call, probe in probes.items()
        if not (probe.keyed and asked) and not (probe.what == "metrics" and adds)
    }
