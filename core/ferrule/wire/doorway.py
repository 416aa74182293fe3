"""Between the launcher's door and an API process: connections and a few messages, on one pair of sockets.

The sockets are of the type SOCK_SEQPACKET, which keeps the borders of messages and tells when the other end has gone.
Connections travel as SCM_RIGHTS (https://man7.org/linux/man-pages/man7/unix.7.html).
"""

from __future__ import annotations

import contextlib
import errno
import socket
from array import array
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from ferrule.interfaces.stats import HttpStats
from ferrule.types import ModelInfo

AT_ONCE = 16  # most connections of one message: an API process takes one message in a turn of its event loop
_BYTES = 1 << 17  # of the largest message
_CONNECTIONS = b"c"
_NO_ROOM = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})  # of the system: it may have some later
_ROOM = socket.CMSG_SPACE(AT_ONCE * array("i").itemsize)


class Probe(Struct, frozen=True):
    """What a path answers with."""

    what: str  # "health" or "metrics": the server's
    keyed: bool = False  # it needs an API key, if there is one; else a host that a server without keys answers under


class Offer(Struct, frozen=True, tag=True):
    """What the door may answer for an API process, by method and path ("GET /health"), and with which API keys.

    It is the process's first message, and comes again when the keys have changed.
    """

    probes: Mapping[str, Probe]
    keys: Mapping[str, bytes] = {}  # name → SHA-256


class Loaded(Struct, frozen=True, tag=True):
    """An API process's word that the model is loaded: its figures are shared from now on."""

    info: ModelInfo


class Refresh(Struct, frozen=True, tag=True):
    """The door's wish for the newest figures, which is answered by `Fresh` with the same number."""

    number: int


class Fresh(Struct, frozen=True, tag=True):
    """The answer to `Refresh`."""

    number: int


class Answered(Struct, frozen=True, tag=True):
    """The door has answered a call, which the API process counts as its own."""

    stats: HttpStats


Message = Offer | Loaded | Refresh | Fresh | Answered


class Doorway:
    """One end. Nothing waits: whoever has no room is told so."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(Message)

    @classmethod
    def pair(cls) -> tuple[Doorway, Doorway]:
        """Both ends; whatever goes in at one comes out at the other. They are not inherited."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Message) -> bool:
        """False, and nothing is sent, when there is no room or the other end has gone."""
        with contextlib.suppress(OSError):
            return self._end.send(msgspec.msgpack.encode(message)) > 0
        return False

    def hand(self, connections: Sequence[socket.socket]) -> bool:
        """Give away at most `AT_ONCE` connections; the caller closes its own descriptors of them.

        False, and none is given, when there is no room. Raises OSError when the other end has gone.
        """
        try:
            socket.send_fds(self._end, [_CONNECTIONS], [each.fileno() for each in connections])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise
        return True

    def receive(self) -> tuple[Sequence[socket.socket], Message | None]:
        """Connections that were given, or a message. Raises BlockingIOError when nothing has come, EOFError when the
        other end has gone."""
        data, ancillary, _, _ = self._end.recvmsg(_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)  # recv_fds drops the flag
        descriptors = array("i", b"".join(rights for _, _, rights in ancillary))
        if descriptors or data == _CONNECTIONS:
            return [_adopted(descriptor) for descriptor in descriptors], None
        if not data:
            raise EOFError
        return (), self._decoder.decode(data)

    def close(self) -> None:
        self._end.close()


def _adopted(descriptor: int) -> socket.socket:
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    return connection
