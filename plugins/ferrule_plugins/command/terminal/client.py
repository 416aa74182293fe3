"""HTTP to any OpenAI-compatible server: a list of models, and streams of chunks.

One connection for each request, which ends with the stream, so a server notices at once when the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from ferrule.errors import ConfigError, StartupError
from ferrule_plugins.command.http_client import DONE, events, open_session
from ferrule_plugins.command.terminal.chunks import Chunk, read_chunk
from ferrule_plugins.command.terminal.screen import one_line

_CONNECT_SECONDS = 10.0
_ERROR_BYTES = 64 << 10
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


class Unanswered(StartupError):
    """An error of a server that cannot be reached, refuses, or breaks off. Message and hint are one line each, fit for
    a terminal.
    """


class Server:
    """A client of one server.

    `url` is the base of the API, `http://host:port/v1`, or a Unix socket, `unix:/path` or `http+unix://%2Fpath/v1`. The
    key is sent only there: redirects are not followed.
    """

    def __init__(self, url: str, key: str) -> None:
        self._socket: str | None
        self._socket, self._base = _socket_of(url) or (None, _base(url))
        self.url = url if self._socket else self._base
        if not key.isascii() or not key.isprintable():
            raise ConfigError("--api-key has characters that an HTTP header cannot carry.")
        self._headers = {"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"}
        self._proxies = self._socket is None and not _LOOPBACK.fullmatch(urlsplit(self._base).hostname or "")

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that the server serves. Raises Unanswered."""
        return asyncio.run(self._models())

    def stream(self, route: str, body: dict[str, Any]) -> Generator[Chunk, None, None]:
        """Yield the chunks of one answer; closing the iterator ends the request. Raises Unanswered, also in between."""
        chunks = self._chunks(route, {**body, "stream": True, "stream_options": {"include_usage": True}})
        with asyncio.Runner() as runner:
            try:
                while (chunk := runner.run(_next(chunks))) is not None:
                    yield chunk
            finally:
                runner.run(_close(chunks))

    async def _models(self) -> tuple[str, ...]:
        async with self._open("GET", "/models") as response:
            try:
                found = json.loads(await response.read())["data"]
                return tuple(str(model["id"]) for model in found)
            except (ValueError, KeyError, TypeError) as error:
                raise Unanswered(f"{self.url}/models did not return a list of models.", _IS_IT) from error

    async def _chunks(self, route: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        complete = False
        async with self._open("POST", route, body) as response, aclosing(events(response)) as found:
            try:
                async for data in found:
                    if data == DONE:
                        return
                    chunk = read_chunk(data)
                    if chunk.error is not None:
                        raise Unanswered(f"The server ended the response with an error: {_message(chunk.error)}")
                    complete = complete or any(choice.finish_reason for choice in chunk.choices)
                    yield chunk
            except aiohttp.ClientPayloadError:
                complete = False
            except ValueError as error:
                raise Unanswered("The server sent something that is not a chunk of a response.", _IS_IT) from error
        if not complete:
            raise Unanswered("The server closed the connection in the middle of the response.")

    @asynccontextmanager
    async def _open(
        self, method: str, route: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its response, which is not a refusal. Raises Unanswered, also while the response is
        read.
        """
        async with open_session(
            self._headers, connect_seconds=_CONNECT_SECONDS, unix_socket=self._socket, proxies=self._proxies
        ) as session:
            url = self._base + route
            try:
                response = await session.request(method, url, json=body, allow_redirects=False)
            except (aiohttp.ClientError, OSError, UnicodeError) as error:
                raise self._unreached(getattr(error, "os_error", error)) from error
            async with response:
                if response.status >= 300:
                    raise await self._refused(response)
                try:
                    yield response
                except (aiohttp.ClientError, OSError) as error:
                    raise Unanswered(f"The connection broke in the middle of the response: {_told(error)}.") from error

    def _unreached(self, reason: BaseException) -> Unanswered:
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

    async def _refused(self, response: aiohttp.ClientResponse) -> Unanswered:
        said, status = await _body_message(response), response.status
        if status == 401:
            return Unanswered(
                f"The server does not accept the API key (401: {said})",
                "Pass --api-key, or set FERRULE_API_KEY or OPENAI_API_KEY.",
            )
        if status < 400:
            target = one_line(response.headers.get("Location") or "another address")
            return Unanswered(f"{self.url} has moved to {target} ({status}).", "Name the new one with --url.")
        wait = one_line(response.headers.get("Retry-After") or "")
        hint = f"Try again in {wait} s." if wait.isdigit() else ""
        if status in {404, 405} and not said.startswith("The model"):
            hint = hint or _IS_IT
        return Unanswered(f"The server answers {status}: {said}", hint)


_IS_IT = "Is --url the base of an OpenAI-compatible API, such as http://localhost:8000/v1?"


def _base(url: str) -> str:
    """Return the base of the API without a slash at its end; a server without a path has its API under /v1.

    Raises ConfigError.
    """
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
    """Return (path of the Unix socket, base of the API there) of a URL that names one, else None. Raises ConfigError.

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


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[Chunk, None]) -> None:
    """End a request, once the task that an interrupt has left reading its answer has ended."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await chunks.aclose()


async def _body_message(response: aiohttp.ClientResponse) -> str:
    found = bytearray()
    try:
        while len(found) < _ERROR_BYTES and (piece := await response.content.read(_ERROR_BYTES - len(found))):
            found += piece
    except (aiohttp.ClientError, OSError):
        return str(response.reason)
    text = found.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except ValueError:
        return one_line(text) or one_line(str(response.reason))
    return _message(body.get("error", body.get("detail", body)) if isinstance(body, dict) else body)


def _message(error: Any) -> str:
    """Return the message of an error object, whatever shape the object has, on one line."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return one_line(error["message"])
    return one_line(error if isinstance(error, str) else json.dumps(error))


def _told(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    told = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(str(told)).rstrip(".")
