"""The HTTP socket, bound before anything is loaded, so that a taken port is reported at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ferrule.config import FrontendConfig
from ferrule.errors import StartupError

_BACKLOG = 4096  # as many as the default of --max-connections; Linux takes no more unless it is told to


def bind(host: str | None, port: int) -> socket.socket:
    """Listen on an address, before anything is loaded. Raises StartupError when the address cannot be had."""
    address = host or "::"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if host is None and not socket.has_dualstack_ipv6():
        address, family = "", socket.AF_INET
    try:
        return socket.create_server(
            (address, port),
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=host is None and family == socket.AF_INET6,
        )
    except OSError as error:
        where = f"{host or 'any address'}, port {port}"
        number = error.errno or 0  # negative: the resolver's
        reason = os.strerror(number).lower() if number > 0 else "the name is not known"
        raise StartupError(
            f"Cannot listen on {where}: {reason}.",
            "Another server may be running there; choose another --port." if port else "",
        ) from None


@contextmanager
def listening(front: FrontendConfig) -> Iterator[socket.socket]:
    """Open the socket that the options ask for, and remove the file of a Unix socket at the end. Raises
    StartupError.
    """
    if front.uds is not None:
        listener = bind_file(front.uds)
        try:
            yield listener
        finally:
            Path(front.uds).unlink(missing_ok=True)
        return
    yield bind(front.host, front.port)


def check_address(front: FrontendConfig) -> None:
    """Raise the StartupError with which `listening` ends for an address that this machine does not have.

    An address that another server uses passes: that server may end before this one starts.
    """
    if front.uds is None:
        bind(front.host, 0).close()
    elif not Path(front.uds).is_socket():
        bind_file(front.uds).close()
        Path(front.uds).unlink(missing_ok=True)


@contextmanager
def probing(front: FrontendConfig) -> Iterator[socket.socket | None]:
    """Yield the listening socket of `--probe-port`, or None without that option. Raises StartupError."""
    if front.probe_port is None:
        yield None
        return
    with bind(front.host, front.probe_port) as listener:
        yield listener


def bind_file(path: str) -> socket.socket:
    """Listen on a Unix socket, with the mode that the umask leaves. Raises StartupError.

    The socket of a dead server is replaced; a live server's socket, and a file that is not a socket, stays.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError):
            if probe.connect_ex(path) == errno.ECONNREFUSED and Path(path).is_socket():
                Path(path).unlink()
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno == errno.EADDRINUSE:
            reason = "a server is listening there, or it is not a socket"
        raise StartupError(f"Cannot listen on {path}: {reason}.", "Choose another --uds.") from None
    return listener
