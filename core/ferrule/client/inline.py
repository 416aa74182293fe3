"""The engine in this process: its loop runs on a thread, and queues take the place of the socket."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from ferrule.assembly.engine import build_engine, open_executor
from ferrule.client.base import until
from ferrule.client.demux import DemuxClient
from ferrule.config import Resolved
from ferrule.engine.loop import EngineLoop
from ferrule.interfaces.plugins import Plugins
from ferrule.wire.messages import Cancel, Fatal, FromEngine, Ready, ToEngine
from ferrule.wire.queues import QueueChannel


class InlineClient(DemuxClient):
    """A client that loads the model on the engine's thread. `wait_ready` returns once it is loaded, or raises the error
    that stopped it.

    Weights are loaded at once if `checked`, else after `begin_loading`.
    """

    def __init__(self, config: Resolved, plugins: Plugins, *, checked: bool = True) -> None:
        super().__init__(None, config.parallel.watchdog_timeout, max_buffered=config.limits.max_buffered_bytes)
        if checked:
            self.begin_loading()
        self._channel = QueueChannel(self._deliver)
        self._events = asyncio.get_running_loop()
        self._stop = threading.Event()
        self.loop: EngineLoop | None = None  # once the model is loaded
        self.startup_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(config, plugins), name="engine", daemon=True)
        self._thread.start()

    async def wait_ready(self) -> None:
        await self._ready.wait()
        if self.startup_error is not None:
            raise self.startup_error
        await super().wait_ready()

    def _post(self, message: ToEngine) -> None:
        self._channel.post(message)

    def _run(self, config: Resolved, plugins: Plugins) -> None:
        try:
            executor = open_executor(config, plugins)
            if not self.board.wait_checked(self._stop):
                return
            engine = build_engine(config, plugins, self._channel, executor, cache_root=os.urandom(32))
        except Exception as error:  # wait_ready raises it
            self.startup_error = error
            self._hand_over(lambda: self.die("The engine did not start."))
            return
        try:
            self.loop = engine.loop
            self._deliver(Ready(engine.info, engine.num_blocks))
            engine.health.begin(lambda: self._deliver(Fatal("The engine failed.")))
            engine.loop.run(self._stop.is_set)
        except Exception:
            engine.loop.log_failure("the engine loop")
            self._deliver(Fatal("The engine failed."))
        finally:
            engine.health.end()
            engine.executor.shutdown()

    def _deliver(self, message: FromEngine) -> None:
        self._hand_over(lambda: self._dispatch(message))

    def _hand_over(self, callback: Callable[[], None]) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(callback)

    async def close(self) -> None:
        self._stop.set()
        self._post(Cancel(()))  # names no request, but wakes an idle loop
        await until(lambda: not self._thread.is_alive(), 10.0 if self._ready.is_set() else 1.0)  # a load ignores it
        self.die("The engine client was closed.")
