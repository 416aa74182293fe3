"""The engine's process: bind the socket, load, run the loop, watch its progress.

Libraries are imported while the API processes check what they need; weights are loaded once all of them have.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

from ferrule import log
from ferrule.assembly.engine import build_engine, open_executor
from ferrule.engine.loop import EngineLoop
from ferrule.errors import FerruleError
from ferrule.launch import collector
from ferrule.launch.prepare import reload_log
from ferrule.launch.process import Boot
from ferrule.launch.reload import told
from ferrule.shared_memory.board import BEAT, STALLED, Board
from ferrule.wire.engine_socket import EngineSocket
from ferrule.wire.messages import Ready

_logger = log.get("engine")


class _Stopped(BaseException):
    """An error that ends the loading of the model at SIGTERM."""


def run_engine(boot: Boot) -> int:
    """Serve plans until SIGTERM (exit status 0) or a fatal fault (1). SIGTERM before the model is loaded ends at once.

    `boot.alive_fd` stays open for as long as this process lives, and in no other process.
    """
    os.set_inheritable(boot.alive_fd, False)
    stopping, loading, serving = threading.Event(), threading.Event(), threading.Event()

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        stopping.set()
        if not loading.is_set():  # libraries are imported, which takes seconds
            os._exit(0)
        if not serving.is_set():
            raise _Stopped

    def on_sighup(signum: int, frame: FrameType | None) -> None:
        # on a thread: this one may be in the middle of writing to the log
        threading.Thread(target=_reload_log, args=(Path(boot.socket_path).parent,), name="reload").start()

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGHUP, on_sighup)
    socket = EngineSocket(Path(boot.socket_path))
    board = boot.board()
    executor = open_executor(boot.config, boot.plugins)
    board.wait_checked(stopping)
    try:
        loading.set()
        engine = build_engine(boot.config, boot.plugins, socket, executor, cache_root=boot.cache_root)
        serving.set()
    except _Stopped:
        return 0
    socket.ready = Ready(engine.info, engine.num_blocks)
    collector.settle()
    engine.health.begin(_stuck)
    watch_progress(engine.loop, boot.config.parallel.watchdog_timeout, board)
    try:
        engine.loop.run(stopping.is_set)
    except Exception:
        engine.loop.log_failure("the engine loop")
        log.flush()
        os._exit(1)  # threads may be stuck in the device: no clean-up can be waited for
    engine.health.end()
    engine.executor.shutdown()
    socket.close()
    return 0


def _stuck() -> None:
    """Exit because the executor is unhealthy while the loop waits for it."""
    _logger.error("a worker is gone, and a step waits for it: the engine stops")
    log.flush()
    os._exit(1)


def _reload_log(folder: Path) -> None:
    try:
        reload_log(told(folder))
    except (FerruleError, OSError, ValueError) as error:
        _logger.error("SIGHUP: the engine's log stays as it was: %s", error)


def _stacks() -> str:
    """Return the stacks of all threads as text."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def watch_progress(loop: EngineLoop, timeout: float, board: Board) -> None:
    """Exit, with every thread's stack on stderr, when work exists and no step has ended for `timeout` seconds.

    Until then the board tells the API processes that this process lives, and how long work has waited. Time in which
    the whole process was stopped does not count. The watch ends with the loop.
    """
    pause = min(1.0, timeout / 4)

    def watch() -> None:
        awake = before = time.monotonic()
        while not loop.ended:
            now = time.monotonic()
            if now - before > pause + 1.0:
                awake = now
            before = now
            waits = min(loop.stalled_for(now), now - awake)
            board.put(STALLED, waits)
            board.put(BEAT, now)
            if waits > timeout:
                _logger.error("no progress for %.0f s with work waiting: the engine stops", timeout)
                log.flush()
                log.last_words(_stacks())
                os._exit(1)
            time.sleep(pause)

    board.put(BEAT, time.monotonic())
    threading.Thread(target=watch, name="watchdog", daemon=True).start()
