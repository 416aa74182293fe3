"""What crosses between two processes is numbered, so that a message that is lost, doubled or late is noticed.

A Unix socket does not do that to messages as long as both ends live. If it happens all the same, no request may get
wrong text or wait for ever: a message that came before is dropped, and a number that is missing is a `Gap`, with which
all requests of that client end in an error. A client sends something every second while it waits, so that a gap at the
end is noticed, too.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ferrule.wire.messages import Gap

M = TypeVar("M")


class Sender(Generic[M]):
    """The sending end of one direction, which numbers messages."""

    def __init__(self) -> None:
        self._number = 0

    def stamp(self, message: M) -> tuple[int, M]:
        """Return the message with the next number, from 1."""
        self._number += 1
        return self._number, message


class Receiver(Generic[M]):
    """The receiving end of one direction, which finds gaps in the numbers."""

    def __init__(self) -> None:
        self._number = 0

    def take(self, number: int, message: M) -> tuple[M | Gap, ...]:
        """Return the messages to act on: the message, with a `Gap` before it where one is missing; nothing where the
        message or a later one has come before.
        """
        expected, self._number = self._number + 1, max(self._number, number)
        if number < expected:
            return ()
        return (message,) if number == expected else (Gap(), message)
