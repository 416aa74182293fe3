"""The server's URL, for messages."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import quote

from ferrule.config import Resolved


def base_url(listener: socket.socket, config: Resolved) -> str:
    """The URL to show to a person; a Unix socket's as clients such as Docker's and requests-unixsocket write it."""
    root = config.frontend.root_path
    if listener.family == socket.AF_UNIX:
        return f"http+unix://{quote(listener.getsockname(), safe='')}{root}"
    scheme = "https" if config.frontend.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    if config.frontend.host is None or ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{root}"
