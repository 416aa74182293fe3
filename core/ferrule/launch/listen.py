"""The HTTP socket: bound before anything is loaded, so that a taken port is said at once."""

from __future__ import annotations

import os
import socket

from ferrule.config import Config
from ferrule.errors import StartupError


def bind(host: str | None, port: int) -> socket.socket:
    """Listen before anything is loaded. Raises StartupError when the address cannot be had."""
    address = host or "::"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if host is None and not socket.has_dualstack_ipv6():
        address, family = "", socket.AF_INET
    try:
        return socket.create_server(
            (address, port), family=family, backlog=2048, dualstack_ipv6=host is None and family == socket.AF_INET6
        )
    except OSError as error:
        where = f"{host or 'any address'}, port {port}"
        number = error.errno or 0  # negative: the resolver's
        reason = os.strerror(number).lower() if number > 0 else "the name is not known"
        raise StartupError(
            f"Cannot listen on {where}: {reason}.",
            "Another server may be running there; choose another --port." if port else "",
        ) from None


def base_url(listener: socket.socket, config: Config) -> str:
    """The URL to show to a person."""
    host, port = listener.getsockname()[:2]
    if config.frontend.host is None or host in {"::", ""}:
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{config.frontend.root_path or ''}"
