"""The engine in a child of a program that is not the launcher, but uses `LLM` or `AsyncLLM`."""

from __future__ import annotations

import shutil
from pathlib import Path

from ferrule.client.base import until
from ferrule.client.process import ProcessClient
from ferrule.config import Resolved
from ferrule.errors import EngineDead, StartupError
from ferrule.launch.process import private_dir, process_table, start_engine
from ferrule.plugin import Plugins
from ferrule.shared_memory.board import READY, Board

_GRACE = 8.0  # seconds that the engine has to exit before it is killed


class EngineChild(ProcessClient):
    """A client that starts its engine as a child, and ends it in `close`.

    It is made on the event loop, by a thread that lives as long: the child dies with the thread that started it.
    """

    def __init__(self, config: Resolved, plugins: Plugins) -> None:
        self._folder = private_dir(config.env.rpc_base_path)
        Board.create(self._folder / "board", num_api=1)
        engine, own = process_table(config, plugins, self._folder)
        self._child = start_engine(engine)
        super().__init__(Path(engine.socket_path), own.board(), config.parallel.watchdog_timeout)

    async def wait_ready(self) -> None:
        """Return when the model is loaded. Raises StartupError."""
        try:
            await super().wait_ready()
        except EngineDead:
            raise StartupError(
                "The engine's process ended before it was ready. It has written why to stderr."
            ) from None
        self.board.put(READY, 1.0)  # this process is the only one that serves

    async def close(self) -> None:
        await super().close()
        self._child.terminate()
        await until(lambda: self._child.poll() is not None, _GRACE)
        self._child.end(0.0)
        shutil.rmtree(self._folder, ignore_errors=True)
