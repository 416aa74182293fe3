"""The messages between the engine and its clients: a closed set of types, msgpack on the wire."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from ferrule.types import EngineRequest, EngineStats, FinishReason, ModelInfo, RequestDelta


class Submit(Struct, frozen=True, tag=True):
    request: EngineRequest


class Cancel(Struct, frozen=True, tag=True):
    """The end of requests. `reason` is ABORT (client gone, deadline) or STOP (stop string found)."""

    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Pause(Struct, frozen=True, tag=True):
    """A pause of a request whose output is not read: it gets no more steps or, with `paused` False, gets them again."""

    id: str
    paused: bool


class Call(Struct, frozen=True, tag=True):
    """An administrative call, answered by one `CallReply` with the same number."""

    number: int
    name: str
    args: tuple[Any, ...] = ()


class Unread(Struct, frozen=True):
    """Deltas of these requests that a client has no memory to decode, as reported by the client's own end."""

    ids: tuple[str, ...]


ToEngine = Submit | Cancel | Pause | Call


class Ready(Struct, frozen=True, tag=True):
    """The answer to a client's greeting, once the model is loaded. `num_blocks` includes the null block."""

    info: ModelInfo
    num_blocks: int


class Deltas(Struct, frozen=True, tag=True):
    """The deltas for one client from a step, a cancellation or a second of idleness."""

    deltas: tuple[RequestDelta, ...]
    stats: EngineStats | None = None


class CallReply(Struct, frozen=True, tag=True):
    """The answer to a `Call`. `error` is a message fit for the caller; `status` is that of HTTP where the caller is at
    fault or may try again, else 500.
    """

    number: int
    result: Any = None
    error: str | None = None
    status: int = 500


class Fatal(Struct, frozen=True, tag=True):
    """The engine's last message, after which its process exits non-zero."""

    message: str


FromEngine = Ready | Deltas | CallReply | Fatal


class Channel(Protocol):
    """The engine's end of the connection with its clients: a socket, or queues where they share a process.

    A client is named by the bytes that its messages came with.
    """

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        """Return the messages that have arrived; wait up to `timeout` seconds for the first one."""
        ...

    def send(self, client: bytes, message: FromEngine) -> None:
        """Send without waiting. A message for a client that has gone is dropped."""
        ...
