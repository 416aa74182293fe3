"""`Buffers`: how many bytes one process keeps for its clients, counted on the board, so that all layers count together.

Counted are bodies, the values that they hold, prompts that wait, answers that are being assembled, and output that is
not read yet. The figures are estimates of what Python needs for each of them.
"""

from __future__ import annotations

from ferrule.shared_memory.board import BUFFERED, Board


class Buffers:
    """A count of the bytes that a process keeps for requests. Several of one board in a process count together. `limit`
    is in bytes.
    """

    def __init__(self, board: Board, limit: int) -> None:
        self.board = board
        self.limit = limit

    @property
    def used(self) -> int:
        return int(self.board.get(BUFFERED, self.board.row))

    @property
    def full(self) -> bool:
        return self.used >= self.limit

    def share(self) -> Share:
        return Share(self)


class Share:
    """The bytes that one request keeps. `close` gives them back, as does the end of the last reference to the share."""

    __slots__ = ("buffers", "size")

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.size = 0  # bytes

    def grow(self, num_bytes: int) -> None:
        """Count more bytes, or fewer, even beyond the limit, as they are already in memory."""
        self.size += num_bytes
        self.buffers.board.add(BUFFERED, num_bytes)

    def close(self) -> None:
        """Give all bytes back. Idempotent."""
        if self.size:
            self.grow(-self.size)

    __del__ = close
