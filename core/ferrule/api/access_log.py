"""The access log: one line per call, escaped, so that nothing from the wire can make a second line."""

from __future__ import annotations

import logging

from ferrule import log
from ferrule.config import Config

_LOGGED = 512  # characters of a path that the access log repeats

_access = log.get("access")


def log_call(client: str, request: tuple[str, bytes, str], status: int, seconds: float, key: str = "") -> None:
    """Log one HTTP call.

    `client` is host:port, or "-"; `request` is the method, the path and the HTTP version; `key` is the name of the
    caller's API key.
    """
    method, raw, version = request
    path = raw[:_LOGGED].decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii")
    named = {"key": key} if key else {}
    _access.info('%s - "%s %s HTTP/%s" %d %.0fms', client, method, path, version, status, seconds * 1000, **named)


def set_level(config: Config) -> None:
    """Apply `--uvicorn-log-level`, unless a logging configuration file sets all levels."""
    level = logging.getLevelNamesMapping().get(config.frontend.uvicorn_log_level.upper(), 5)  # 5: uvicorn's trace
    for name in () if config.observability.log_config_file else ("uvicorn.error", "ferrule.access"):
        logging.getLogger(name).setLevel(level)
