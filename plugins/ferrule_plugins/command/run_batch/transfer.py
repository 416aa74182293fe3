"""Input and output that are URLs: one GET, one PUT, with limits and a few tries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import aiohttp

from ferrule import log
from ferrule.errors import StartupError
from ferrule_plugins.command.http_client import open_session

_PAUSES = (0.5, 2.0)  # seconds before the second and the third try
_REDIRECTS = 5
_PIECE = 1 << 20
_TRANSIENT = (408, 429)

_logger = log.get("batch")


class _Again(Exception):
    """An error of one try after which another may succeed."""


def is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def shown(url: str) -> str:
    """Return a URL without its query, its user and its password: they are often secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def download(url: str, into: BinaryIO, most: int) -> None:
    """Fetch `url` into a file, at most `most` bytes. Raises StartupError."""

    async def once(session: aiohttp.ClientSession) -> None:
        into.seek(0)
        into.truncate()
        async with session.get(url, max_redirects=_REDIRECTS) as response:
            _check(response, "GET", url)
            size = 0
            async for piece in response.content.iter_chunked(_PIECE):
                size += len(piece)
                if size > most:
                    raise StartupError(f"{shown(url)} is larger than {most} bytes.", "See --max-input-bytes.")
                into.write(piece)
        into.flush()

    asyncio.run(_tried(once, "GET", url))


def upload(file: BinaryIO, url: str) -> None:
    """Send the whole of a file to `url` by PUT. Raises StartupError."""

    async def once(session: aiohttp.ClientSession) -> None:
        size = file.seek(0, 2)
        headers = {"Content-Type": "application/jsonl", "Content-Length": str(size)}
        async with session.put(url, data=_pieces(file), headers=headers, allow_redirects=False) as response:
            _check(response, "PUT", url)

    asyncio.run(_tried(once, "PUT", url))


async def _pieces(file: BinaryIO) -> Any:
    file.seek(0)
    while piece := file.read(_PIECE):
        yield piece


def _check(response: aiohttp.ClientResponse, method: str, url: str) -> None:
    if 200 <= response.status < 300:
        return
    message = f"{method} {shown(url)} was answered {response.status}."
    if response.status >= 500 or response.status in _TRANSIENT:
        raise _Again(message)
    raise StartupError(message)


async def _tried(once: Callable[[aiohttp.ClientSession], Awaitable[None]], method: str, url: str) -> None:
    async with open_session(connect_seconds=10, silence_seconds=60, proxies=True) as session:
        for pause in (*_PAUSES, None):
            try:
                await once(session)
                return
            except _Again as error:
                message = str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                message = f"{method} {shown(url)} failed: {type(error).__name__}."
            if pause is None:
                raise StartupError(message)
            _logger.warning("%s Trying again.", message)
            await asyncio.sleep(pause)
