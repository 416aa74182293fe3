"""The address of the server, for messages."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from urllib.parse import quote

from ferrule.config import Resolved


def exposure(listener: socket.socket, config: Resolved) -> str:
    """Return a warning where other machines may use the server without a key; else an empty string."""
    front = config.frontend
    if front.api_key or front.api_key_file or front.ssl_cert_reqs == ssl.CERT_REQUIRED:
        return ""
    if listener.family == socket.AF_UNIX or _address(listener).is_loopback:
        return ""
    where = "on all addresses of this machine" if _address(listener).is_unspecified else f"on {_address(listener)}"
    return (
        f"port {listener.getsockname()[1]} is open {where}, and there is no API key: whoever reaches it may use the "
        "model. Give --api-key or --api-key-file, or --host 127.0.0.1 to serve this machine alone"
    )


def reach(listener: socket.socket, config: Resolved) -> str:
    """Return the server's URL for the log, with a note where it listens on all addresses."""
    everywhere = listener.family != socket.AF_UNIX and _address(listener).is_unspecified
    others = f", and on port {listener.getsockname()[1]} of all addresses of this machine" if everywhere else ""
    return f"{base_url(listener, config)}/v1{others}"


def _address(listener: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])


def base_url(listener: socket.socket, config: Resolved) -> str:
    """Return the URL to show to a person; a Unix socket's is written as for Docker's client and requests-unixsocket."""
    root = config.frontend.root_path
    if listener.family == socket.AF_UNIX:
        return f"http+unix://{quote(listener.getsockname(), safe='')}{root}"
    scheme = "https" if config.frontend.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    if _address(listener).is_unspecified:
        host = "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{root}"
