"""HTTP/1.1 with the limits that uvicorn does not have: size and time of headers, stalled writes, connections."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ferrule.api.arrivals import Turns
from ferrule.api.errors import failure_of
from ferrule.api.lifecycle import Lifecycle
from ferrule.api.origin import host_of
from ferrule.api.respond import CLOSE
from ferrule.config import LimitsConfig
from ferrule.errors import FerruleError, HeadersTooLargeError, RequestError, TooSlowError, UnavailableError
from ferrule.interfaces.dialect import encode

_MAX_HEADERS = 128
_MAX_URL_BYTES = 8 << 10
_MAX_PIPELINED = 8
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding", b"upgrade"})  # the parser reads these
_BODIES = frozenset({b"content-length", b"transfer-encoding"})  # one of these announces a body
_LINGER_SECONDS = 1.0  # for a refused client to read its answer


class _VersionError(RequestError):
    status = 505
    kind = "HTTPVersionNotSupportedError"


class _CodingError(RequestError):
    status = 501
    kind = "NotImplementedError"


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `limits`, `lifecycle` and `turns` are set by `protocol_class`.

    `_unspent` counts bytes received since the parser last finished something (headers, body bytes, a message): it
    bounds a header that never ends, trailers, and a body that nobody asked for.
    """

    limits: LimitsConfig
    lifecycle: Lifecycle
    turns: Turns
    url: bytes = b""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal: FerruleError | None = None
        self._header_bytes = 0
        self._header_count = 0
        self._unspent = 0
        self._has_head = False  # what comes as headers from now on are trailers
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._full = False  # the requests that wait behind another are as many as may: later ones are dropped
        self._deaf = False  # such a one has come: nothing more is read of this connection

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(UnavailableError("The server has too many open connections.", retry_after=1))
        else:
            self._arm_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        # With pipelined requests the running one is not the last, which is all that the base class tells.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._deaf or self.transport.is_closing():
            return
        self._unspent += len(data)
        super().data_received(data)
        if self._unspent > self.limits.max_header_bytes and self._refusal is None:
            self._refuse(HeadersTooLargeError(f"Headers are larger than {self.limits.max_header_bytes} bytes."))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # ---- the parser

    def on_message_begin(self) -> None:
        if self._full:
            self._deaf = True
            raise RequestError("Too many requests wait for their turn on this connection.")
        super().on_message_begin()
        self._header_bytes = self._header_count = 0
        self._has_head = False
        if self._header_timer is None:
            self._arm_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _MAX_URL_BYTES:
            self._refusal = HeadersTooLargeError(f"The URL is longer than {_MAX_URL_BYTES} bytes.")
            raise self._refusal
        if not url.isascii():
            self._refusal = RequestError("The URL must be ASCII; escape other characters.")
            raise self._refusal

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        self._header_count += 1
        if self._header_bytes > self.limits.max_header_bytes or self._header_count > _MAX_HEADERS:
            self._refusal = HeadersTooLargeError(
                f"Headers are limited to {self.limits.max_header_bytes} bytes and {_MAX_HEADERS} lines."
            )
            raise self._refusal
        if not self._has_head:
            super().on_header(name, value)
        elif name.lower() in _FRAMING:
            self._refusal = RequestError("A trailer cannot say where the message or the connection ends.")
            raise self._refusal
        # Other trailers are dropped (RFC 9110, 6.5.1): they would act only if they came in time.

    def on_headers_complete(self) -> None:
        self._unspent = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._has_head = True
        self._check_head()
        super().on_headers_complete()
        cycle = weakref.ref(self.cycle)  # it has the scope

        def close() -> None:
            if (lives := cycle()) is not None:
                lives.keep_alive = False

        self.scope["state"][CLOSE] = close
        if self.pipeline:
            self.flow.resume_reading()  # or the client's end would not be seen
            if len(self.pipeline) >= _MAX_PIPELINED:
                self._full = True
                self.cycle.keep_alive = False  # its answer says that it is the last one

    def _check_head(self) -> None:
        """Refuse a head that another server on the way might read differently."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            self._refusal = _VersionError(f"HTTP/{version} is not supported; use HTTP/1.1.")
        elif len(hosts) > 1 or (not hosts and version == "1.1"):
            self._refusal = RequestError("The request needs exactly one Host header.", "Host")
        elif codings and codings != [b"chunked"]:
            self._refusal = _CodingError("Transfer-Encoding may only be chunked.", "Transfer-Encoding")
        elif codings and version == "1.0":
            self._refusal = RequestError("HTTP/1.0 has no Transfer-Encoding.", "Transfer-Encoding")
        else:
            try:
                host_of(hosts)
            except RequestError as error:
                self._refusal = error
        if self._refusal is not None:
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._unspent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unspent = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport is not None and self.transport.is_closing() and self._stall_timer is None:
            # What is left in the buffer must go out in time, or the connection would stay for ever.
            self._stall_timer = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        begin = partial(super()._start_asgi_task, cycle, app)
        if any(name in _BODIES for name, _ in self.headers):
            self.turns.begin(begin)
        else:  # there is little to do, and it may be a probe
            begin()

    # ---- refusing

    def _arm_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        self._refuse(TooSlowError(f"No complete headers within {self.limits.header_timeout:g} s."))

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser, or one of the callbacks above, did not accept."""
        if self._deaf:
            return
        self._refuse(self._refusal or RequestError("The request is not valid HTTP/1.1."))

    def _refuse(self, error: FerruleError) -> None:
        """Answer with an error and close; in the middle of another answer, only close.

        What the client still sends is dropped for a moment: closing at once would reset the connection, and lose the
        answer.
        """
        self._refusal = error
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and not running.response_complete:
            if running.response_started:
                self.transport.abort()
                return
            running.disconnected = True
            running.message_event.set()
        failure = failure_of(error)
        body = encode(self.lifecycle.dialect(self.url).error(failure))
        lines = [f"HTTP/1.1 {failure.status} {failure.kind}", "content-type: application/json", "connection: close"]
        lines += [f"{name}: {value}" for name, value in failure.headers]
        lines.append(f"content-length: {len(body)}")
        self.transport.write("\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body)
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self.flow.resume_reading()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._stall_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


def protocol_class(limits: LimitsConfig, lifecycle: Lifecycle) -> type[GuardedProtocol]:
    """Return a protocol class with these limits, as uvicorn takes it.

    Its connections share the turns of one event loop, in each of which `Lifecycle.at_once` requests with a body begin.
    """
    shared = {"limits": limits, "lifecycle": lifecycle, "turns": Turns(lifecycle.at_once)}
    return type("Protocol", (GuardedProtocol,), shared)
