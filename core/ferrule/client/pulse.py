"""Signs of life of the server's processes, by their heartbeats on the board."""

from __future__ import annotations

from ferrule.interfaces.service import Health
from ferrule.shared_memory.board import Board


def stalled_engine(board: Board, watchdog: float) -> Health | None:
    """Return the state of an engine that makes no progress; None for one that makes progress."""
    waits = board.stalled(watchdog)
    return Health(state="stalled", detail=f"The engine has made no progress for {waits:.0f} s.") if waits else None


def stalled_api(board: Board) -> Health | None:
    """Return the state of a server in which another API process is stalled; None where none is."""
    silent = board.silent_api()
    if not silent:
        return None
    return Health(state="stalled", detail=f"An API process has made no progress for {silent:.0f} s.")
