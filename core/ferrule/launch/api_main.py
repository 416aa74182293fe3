"""The API process: HTTP on the inherited socket, and the engine behind a client."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ferrule import __version__, log
from ferrule.api.server import loop_factory, serve
from ferrule.client.base import EngineClient
from ferrule.client.inline import InlineClient
from ferrule.client.process import ProcessClient
from ferrule.config import Resolved
from ferrule.frontend.service import build_service
from ferrule.hooks import HookRunner, open_hooks
from ferrule.interfaces.service import Service
from ferrule.launch import collector
from ferrule.launch.check import open_api
from ferrule.launch.engine_main import watch_progress
from ferrule.launch.listen import exposure, reach
from ferrule.launch.prepare import reload_log
from ferrule.launch.probe_server import tell_model
from ferrule.launch.process import Boot
from ferrule.launch.reload import Reloader, told
from ferrule.plugin import Plugins
from ferrule.shared_memory.board import BEAT, READY, Board

_POLL = 0.02  # seconds between two looks at the other API processes' cells

_logger = log.get("api")


def run_api(boot: Boot, hooks: HookRunner) -> int:
    """Serve until the supervisor asks to stop or the engine dies. Returns the exit status."""
    os.set_inheritable(boot.listen_fd, False)
    listener = socket.socket(fileno=boot.listen_fd)

    async def main() -> int:
        parallel, limits = boot.config.parallel, boot.config.limits
        restarts = parallel.engine_restarts > 0
        path, watchdog = Path(boot.socket_path), parallel.watchdog_timeout
        board = boot.board()
        board.watched = boot.config.frontend.probe_port is not None
        client = ProcessClient(path, board, watchdog, restarts, limits.max_buffered_bytes)
        return await _serve(boot.config, boot.plugins, hooks, listener, client, lambda: told(path.parent))

    return _run(main())


def run_one_process(config: Resolved, plugins: Plugins, listener: socket.socket, reloader: Reloader) -> int:
    """Run HTTP, engine and model in this process (`--disable-frontend-multiprocessing`). Returns the exit status.

    Raises StartupError.
    """
    hooks = open_hooks(plugins, config)
    hooks.process_started("api-0", config)

    async def main() -> int:
        client = InlineClient(config, plugins, checked=False)
        return await _serve(config, plugins, hooks, listener, client, lambda: reloader.read(config))

    status = 1
    try:
        status = _run(main())
        return status
    finally:
        hooks.process_stopping("api-0", status)


def _run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


async def _serve(
    config: Resolved,
    plugins: Plugins,
    hooks: HookRunner,
    listener: socket.socket,
    client: ProcessClient | InlineClient,
    reread: Callable[[], Resolved],
) -> int:
    board = client.board

    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        front, inputs = open_api(config, plugins, board, hooks)  # while the engine imports its libraries
        front.reloads.add("log", reload_log)
        client.begin_loading()

        async def connect() -> Service:
            await client.wait_ready()
            if isinstance(client, InlineClient) and client.loop is not None:
                watch_progress(client.loop, config.parallel.watchdog_timeout, board)
            service = build_service(config, plugins, client, hooks=hooks, inputs=inputs)
            stack.push_async_callback(service.close)
            front.reloads.add("limits of requests", lambda new: service.take_limits(new.limits))
            service.start()
            collector.settle()
            if board.leads:
                if board.folder is not None and board.watched:
                    tell_model(board.folder, client.info)
                while board.total(READY) < board.rows - 2:
                    await asyncio.sleep(_POLL)
                announce(config, client, listener, hooks)
            asyncio.get_running_loop().call_soon(board.put, READY, 1.0)  # once the service that is returned is in use
            return service

        beating = asyncio.create_task(_beat(board))
        stack.callback(beating.cancel)
        return await serve(config, front, listener, connect, reread)


async def _beat(board: Board) -> None:
    """Show other processes that the event loop runs."""
    while True:
        board.put(BEAT, time.monotonic())
        await asyncio.sleep(1.0)


def announce(config: Resolved, client: EngineClient, listener: socket.socket, hooks: HookRunner) -> None:
    """Log the server's first lines: the model, its device, the room for requests, and the server's address."""
    info = client.info
    _logger.info(
        "ferrule %s serves %s: %s (%s), %.1f M parameters, %s",
        __version__,
        config.model.served_model_name[0],
        info.architecture,
        info.implementation,
        info.num_parameters / 1e6,
        info.quantization or info.dtype,
    )
    _logger.info("device %s, attention %s, weights %.2f GiB", info.device, info.attention, info.weight_bytes / 2**30)
    for note in info.notes:
        _logger.info("%s", note)
    room = "no KV cache: the model keeps a state for each request" if info.groups else "no KV cache"
    if info.page_bytes:
        blocks, tokens = client.num_blocks - 1, info.groups[0].block_size
        room = f"KV cache: {blocks} blocks of {tokens} tokens, room for {blocks * tokens} tokens"
        room += f" ({client.num_blocks * info.page_bytes / 2**30:.2f} GiB)"
    if info.max_snapshots:
        size = info.max_snapshots * info.state_bytes / 2**30
        room += f"; {info.max_snapshots} saved states for cached prefixes ({size:.2f} GiB)"
    _logger.info("%s; longest request %d tokens", room, info.max_model_len)
    if "generate" not in info.tasks:
        _logger.warning(
            "%s is for %s, which no route gives yet: use LLM.embed", info.architecture, ", ".join(info.tasks)
        )
    for line in hooks.report_header(config):
        _logger.info("%s", line)
    if warning := exposure(listener, config):
        _logger.warning("%s", warning)
    _logger.info("ready at %s", reach(listener, config))
