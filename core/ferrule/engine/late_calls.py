"""Answers of administrative calls, of which some come later: a call that reads files does not hold up steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ferrule.errors import FerruleError, RequestError, UnavailableError
from ferrule.wire.messages import Call, CallReply, Channel

LogFailure = Callable[[str], None]


class LateCalls:
    """The calls whose functions have returned a future that is not done. True while there are some."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: list[tuple[bytes, Call, Future[Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def run(
        self, client: bytes, call: Call, functions: Mapping[str, Callable[..., Any]], log_failure: LogFailure
    ) -> None:
        """Run one of the functions and answer the call, at once or when the future that the function gives is done."""

        def run() -> Any:
            if call.name not in functions:
                raise FerruleError(f"there is no call {call.name!r}")
            result = functions[call.name](*call.args)
            if isinstance(result, Future):
                self._open.append((client, call, result))
            return result

        reply = _reply(call, run, log_failure)
        if not isinstance(reply.result, Future):
            self._channel.send(client, reply)

    def answer(self, log_failure: LogFailure) -> None:
        """Answer the calls whose futures are done."""
        for entry in [entry for entry in self._open if entry[2].done()]:
            self._open.remove(entry)
            client, call, future = entry
            self._channel.send(client, _reply(call, future.result, log_failure))


def _reply(call: Call, function: Callable[[], Any], log_failure: LogFailure) -> CallReply:
    """Call a function. Return its result, or its error as a client may read it."""
    try:
        return CallReply(call.number, function())
    except (FerruleError, AssertionError) as error:
        status = error.status if isinstance(error, RequestError | UnavailableError) else 500
        return CallReply(call.number, error=str(error), status=status)
    except Exception:
        log_failure(f"the call {call.name}")
        return CallReply(call.number, error=f"{call.name} failed; the log says why")
