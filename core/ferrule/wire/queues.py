"""Engine and client in one process: queues in the place of the socket."""

from __future__ import annotations

import queue
from collections.abc import Callable

from ferrule.wire.messages import FromEngine, ToEngine

CLIENT = b"inline"  # the only one


class QueueChannel:
    """The engine's end, for a client in the same process: the engine's thread calls it, and the client's thread calls
    `post`.

    `deliver` takes a message for the client on the engine's thread.
    """

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def post(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        messages: list[tuple[bytes, ToEngine]] = []
        try:
            if timeout > 0:
                messages.append((CLIENT, self._inbox.get(timeout=timeout)))
            while True:
                messages.append((CLIENT, self._inbox.get_nowait()))
        except queue.Empty:
            return messages

    def send(self, client: bytes, message: FromEngine) -> None:
        self._deliver(message)
