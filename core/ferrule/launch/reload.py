"""SIGHUP: the options are read again, and those that need no restart take effect.

The launcher reads them and writes the configuration beside the board; each process takes from there what is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from ferrule import log
from ferrule.config import Config, Resolved
from ferrule.config.parse import config_schema
from ferrule.config.places import placed
from ferrule.config.resolve import resolve
from ferrule.errors import ConfigError

# By section: the options that can be reloaded. Files that other options name are reread by their components.
RELOADED = {
    "frontend": frozenset({"api_key", "api_key_file", "admin_key", "uvicorn_log_level"}),
    "observability": frozenset({"log_level"}),
    "limits": frozenset(
        {
            *("max_body_bytes", "max_json_depth", "body_timeout", "max_n", "max_prompts", "max_stop_strings"),
            *("max_stop_length", "max_bad_words", "max_prompt_logprob_cells", "max_logprob_cells"),
            *("max_waiting_requests", "max_waiting_tokens", "max_key_requests", "key_tokens_per_minute"),
        }
    ),
}
_FILE = "config.json"

_logger = log.get("launch")


def merge(running: Resolved, given: Config, new: Config) -> tuple[Resolved, list[str]]:
    """Return the running configuration with the options of `new` that can be reloaded, and the flags of those that
    cannot.

    `given` is the configuration of the start. Raises ConfigError for values that contradict each other.
    """
    with placed(new):
        resolve(new)
    stale = []
    for spec in config_schema().specs:
        before, now = (getattr(getattr(config, spec.section), spec.name) for config in (given, new))
        if before != now and spec.name not in RELOADED.get(spec.section, ()):
            stale.append(spec.flag)
    sections = {
        name: dataclasses.replace(
            getattr(running, name), **{each: getattr(getattr(new, name), each) for each in sorted(names)}
        )
        for name, names in RELOADED.items()
    }
    return dataclasses.replace(running, **sections), stale


class Reloader:
    """The launcher's part of a reload. `given` is the configuration of the start; `reread` reads it again and raises
    ConfigError.
    """

    def __init__(self, given: Config, reread: Callable[[], Config]) -> None:
        self._given = given
        self._reread = reread
        self._terminal = Terminal()

    def read(self, running: Resolved) -> Resolved:
        """Return the running configuration with its changes; changes that need a restart are logged.

        Raises ConfigError where nothing is to be reloaded. That includes a terminal that is gone, for which this
        process gets a SIGTERM.
        """
        if self._terminal.is_gone():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ConfigError("The terminal is gone: the server stops.")
        new = self._reread()
        config, stale = merge(running, self._given, new)
        if stale:
            _logger.warning(
                "SIGHUP: changed options that need a restart, which stay as they were: %s", ", ".join(stale)
            )
        return config


def tell(folder: Path, config: Resolved) -> None:
    """Write the configuration for the other processes, in one step: the file is complete at any moment."""
    new = folder / f"{_FILE}.new"
    new.write_bytes(msgspec.json.encode(config))
    new.replace(folder / _FILE)


def told(folder: Path) -> Resolved:
    """Return the configuration that `tell` wrote. Raises OSError, ValueError."""
    return msgspec.json.decode((folder / _FILE).read_bytes(), type=Resolved)


class Terminal:
    """The terminal of the start. It tells a SIGHUP that asks for a reload from one because the terminal is gone, which
    asks to stop.

    Under nohup no SIGHUP asks to stop.
    """

    def __init__(self) -> None:
        self._had_one = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def is_gone(self) -> bool:
        return self._had_one and not _has_terminal()


def _has_terminal() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False
