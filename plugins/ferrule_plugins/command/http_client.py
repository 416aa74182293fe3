"""The HTTP client of all commands: sessions of aiohttp, and the events of a streamed response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from ferrule import __version__

DONE = b"[DONE]"  # the data of the last event of OpenAI's streams
_LINE_BYTES = 16 << 20


def open_session(
    headers: Mapping[str, str] | None = None,
    *,
    connect_seconds: float | None = None,
    silence_seconds: float = 600.0,  # between two bytes of an answer: a long prompt may wait in a queue
    unix_socket: str | None = None,
    proxies: bool = False,
) -> aiohttp.ClientSession:
    """Return a session for any number of concurrent requests on the running event loop. The caller closes it.

    With `unix_socket` all requests go to that socket, whatever host they name; with `proxies` the proxies named in the
    environment are used.
    """
    connector = aiohttp.TCPConnector(limit=0) if unix_socket is None else aiohttp.UnixConnector(unix_socket, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=silence_seconds)
    return aiohttp.ClientSession(
        connector=connector,
        headers={"User-Agent": f"ferrule/{__version__}", **(headers or {})},
        timeout=timeout,
        trust_env=proxies,
        read_bufsize=_LINE_BYTES // 2,  # a line may have twice as much
    )


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the data of each server-sent event; a body of plain JSON counts as one.

    Raises ValueError for a line without an end, and aiohttp.ClientPayloadError where the connection ends too early.
    """
    if "json" in response.content_type:
        yield await response.read()
        return
    data: list[bytes] = []
    try:
        async for line in response.content:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    except LineTooLong as error:
        raise ValueError("a line without an end") from error
    if data:
        yield b"\n".join(data)
