"""HTTP to any OpenAI-compatible server, on the standard library: a list of models, and streams of chunks.

One connection for each request, which ends with the stream, so a server notices at once when the client disconnects.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import urllib.request
from collections.abc import Generator, Iterator
from functools import partial
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from ferrule import __version__
from ferrule.errors import ConfigError, StartupError
from ferrule_plugins.command.terminal.chunks import Chunk, read_chunk
from ferrule_plugins.command.terminal.screen import one_line

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0  # between two bytes of an answer: a long prompt may wait in a queue
_LINE_BYTES = 16 << 20
_ERROR_BYTES = 64 << 10
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


class Unanswered(StartupError):
    """The server cannot be reached, refuses, or breaks off. Message and hint are one line each, fit for a terminal."""


class Server:
    """`url` is the base of the API, `http://host:port/v1`, or a Unix socket, `unix:/path` or `http+unix://%2Fpath/v1`.

    The key goes there alone: redirects are not followed.
    """

    def __init__(self, url: str, key: str) -> None:
        path, self._base = _socket_of(url) or (None, _base(url))
        self.url = url if path else self._base
        if not key.isascii() or not key.isprintable():
            raise ConfigError("--api-key has characters that an HTTP header cannot carry.")
        self._headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "User-Agent": f"ferrule/{__version__}",
        }
        handlers: list[urllib.request.BaseHandler] = [_Http(path), _Https(), _NoRedirect()]
        if _LOOPBACK.fullmatch(urlsplit(self._base).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def models(self) -> tuple[str, ...]:
        """Names of the models that the server serves. Raises Unanswered."""
        with self._open("/models") as response:
            try:
                found = json.load(response)["data"]
                return tuple(str(model["id"]) for model in found)
            except (OSError, http.client.HTTPException) as error:
                raise Unanswered(f"The connection to {self.url} broke: {_told(error)}.") from error
            except (ValueError, KeyError, TypeError) as error:
                raise Unanswered(f"{self.url}/models did not return a list of models.", _IS_IT) from error

    def stream(self, route: str, body: dict[str, Any]) -> Generator[Chunk, None, None]:
        """The chunks of one answer. Closing the iterator ends the request. Raises Unanswered, also in the middle."""
        with self._open(route, {**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
            complete = False
            try:
                for data in _events(response):
                    if data == "[DONE]":
                        return
                    chunk = read_chunk(data)
                    if chunk.error is not None:
                        raise Unanswered(f"The server ended the response with an error: {_message(chunk.error)}")
                    complete = complete or any(choice.finish_reason for choice in chunk.choices)
                    yield chunk
            except (OSError, http.client.HTTPException) as error:
                raise Unanswered(f"The connection broke in the middle of the response: {_told(error)}.") from error
            except ValueError as error:
                raise Unanswered("The server sent something that is not a chunk of a response.", _IS_IT) from error
            if not complete:
                raise Unanswered("The server closed the connection in the middle of the response.")

    def _open(self, route: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + route, data=data, headers=self._headers)
        try:
            return self._opener.open(request, timeout=_CONNECT_SECONDS)
        except HTTPError as error:
            with error:
                raise self._refused(error) from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise self._unreached(error.reason if isinstance(error, URLError) else error) from error

    def _unreached(self, reason: str | BaseException) -> Unanswered:
        if isinstance(reason, (ConnectionRefusedError, FileNotFoundError)):
            what = "the connection is refused" if isinstance(reason, ConnectionRefusedError) else "there is no socket"
            return Unanswered(
                f"Nothing answers at {self.url}: {what}.",
                "Start a server with `ferrule serve MODEL`, wait until it is ready, or name another with --url.",
            )
        if isinstance(reason, socket.gaierror):
            return Unanswered(f"The host of {self.url} is not known.", "Check --url.")
        if isinstance(reason, ssl.SSLError):
            hint = "Check http and https in --url; SSL_CERT_FILE names a file of additional authorities."
            return Unanswered(f"No TLS connection to {self.url}: {_told(reason)}.", hint)
        return Unanswered(f"No answer from {self.url}: {_told(reason)}.", "Check --url and the network.")

    def _refused(self, error: HTTPError) -> Unanswered:
        said = _body_message(error)
        if error.code == 401:
            return Unanswered(
                f"The server does not accept the API key (401: {said})",
                "Pass --api-key, or set FERRULE_API_KEY or OPENAI_API_KEY.",
            )
        if 300 <= error.code < 400:
            target = one_line(error.headers.get("Location") or "another address")
            return Unanswered(f"{self.url} has moved to {target} ({error.code}).", "Name the new one with --url.")
        wait = one_line(error.headers.get("Retry-After") or "")
        hint = f"Try again in {wait} s." if wait.isdigit() else ""
        if error.code in {404, 405} and not said.startswith("The model"):
            hint = hint or _IS_IT
        return Unanswered(f"The server answers {error.code}: {said}", hint)


_IS_IT = "Is --url the base of an OpenAI-compatible API, such as http://localhost:8000/v1?"


def _base(url: str) -> str:
    """The base without a slash at its end; a server without a path has its API under /v1. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine or not url.isprintable() or " " in url:
        raise ConfigError(f"--url {url!r} is not the URL of a server.", "Expected: http://HOST:PORT/v1, or unix:/PATH.")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError("--url takes no user, query or fragment.", "A key goes to --api-key.")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _socket_of(url: str) -> tuple[str, str] | None:
    """(path of the Unix socket, base of the API there) of a URL that names one. Raises ConfigError.

    The path stands as it is, or quoted (`%2Frun%2Fferrule.sock`) with the API's own path behind it.
    """
    scheme, _, rest = url.partition(":")
    if scheme not in {"unix", "http+unix"}:
        return None
    path, api = rest.removeprefix("//"), ""
    if path[:3].upper() == "%2F":
        path, _, api = path.partition("/")
        path = unquote(path)
    if not path.startswith("/") or not path.isprintable():
        raise ConfigError(f"--url {url!r} names no socket.", "Expected: unix:/PATH, or http+unix://%2FPATH/v1.")
    return path, _base(f"http://localhost/{api}")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event; a plain JSON body counts as one."""
    if "json" in (response.headers.get("Content-Type") or ""):
        yield response.read(_LINE_BYTES).decode("utf-8", "replace")
        return
    data: list[bytes] = []
    while line := response.readline(_LINE_BYTES):
        if not line.endswith(b"\n") and len(line) == _LINE_BYTES:
            raise ValueError("a line without an end")
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data).decode("utf-8", "replace")
            data = []
    if data:
        yield b"\n".join(data).decode("utf-8", "replace")


def _body_message(error: HTTPError) -> str:
    try:
        text = error.read(_ERROR_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return error.reason
    try:
        body = json.loads(text)
    except ValueError:
        return one_line(text) or one_line(str(error.reason))
    return _message(body.get("error", body.get("detail", body)) if isinstance(body, dict) else body)


def _message(error: Any) -> str:
    """The sentence in an error object, whatever shape it has."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return one_line(error["message"])
    return one_line(error if isinstance(error, str) else json.dumps(error))


def _told(error: str | BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    told = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(str(told)).rstrip(".")


# ------------------------------------------------------------------------------------------ urllib's parts


def _patient(connection: http.client.HTTPConnection) -> None:
    """Connected: from here on, silence may last longer."""
    sock: socket.socket = connection.sock
    sock.settimeout(_SILENCE_SECONDS)


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _patient(self)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, timeout: float) -> None:
        super().__init__(host, timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        _patient(self)


class _TlsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _patient(self)


class _Http(urllib.request.HTTPHandler):
    """`path`: the Unix socket to connect to, whatever host is named; None: over TCP."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self._connect: Any = _Connection if path is None else partial(_UnixConnection, path)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None
