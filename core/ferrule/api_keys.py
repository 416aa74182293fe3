"""Who calls: API keys with names and limits, from options and from a file that can be read again.

The file of `--api-key-file` is YAML, one entry for each key, by the name that logs and metrics show in its place::

    alice: sk-alice-1f6c
    nightly:
      sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8  # of the key, which is then in no file
      max_requests: 8            # in progress at the same time
      tokens_per_minute: 60000   # of prompts and of answers
    operator: {key: sk-operator-77, admin: true}   # opens the routes for administration, too
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ferrule.config import Config
from ferrule.errors import CheckpointError, ConfigError, OverloadedError
from ferrule.shared_memory.board import MAX_CALLERS, OPEN, SPENT, SPENT_IN, Board, caller_cell

_MINUTE = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
Count = Annotated[int, Meta(ge=1)]


class KeyEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the file of keys: the key itself, or its SHA-256 in hexadecimal digits, and the key's limits."""

    key: Annotated[str, Meta(min_length=1)] | None = None
    sha256: Digest | None = None
    max_requests: Count | None = None
    tokens_per_minute: Count | None = None
    admin: bool = False


class Caller(Struct, frozen=True):
    """The owner of one key. A limit of None stands for no limit."""

    name: str
    digest: bytes  # SHA-256 of the key
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    admin: bool = False


class Callers:
    """The keys of a server, and how much of its limits each uses, in all API processes together.

    Minutes are those of the machine's monotonic clock; the tokens of one minute do not count in the next.
    """

    def __init__(self, config: Config, board: Board | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys of a configuration. Raises ConfigError for a file that cannot be used."""
        self._board = board or Board()
        self._clock = clock
        self._known: dict[str, int] = {}  # name → its number on the board
        self._callers: tuple[Caller, ...] = ()
        self.read(config)

    def __len__(self) -> int:
        return len(self._callers)

    def read(self, config: Config) -> tuple[str, ...]:
        """Read the keys of a configuration and the file as it is now, and return the names of all keys.

        Raises ConfigError; then all keys stay as they were.
        """
        front, limits = config.frontend, config.limits
        found = [Caller(f"key-{number}", _digest(key.encode())) for number, key in enumerate(front.api_key, 1)]
        if front.api_key_file:
            found += read_file(Path(front.api_key_file))
        _check(found, front.api_key_file)
        self._callers = tuple(
            replace(
                caller,
                max_requests=caller.max_requests or limits.max_key_requests,
                tokens_per_minute=caller.tokens_per_minute or limits.key_tokens_per_minute,
            )
            for caller in found
        )
        self._renumber([caller.name for caller in found])
        return tuple(self._known)

    def find(self, key: bytes) -> Caller | None:
        """Return the caller with this key, or None. All keys are compared, each in constant time."""
        presented = _digest(key)
        matches = [caller for caller in self._callers if hmac.compare_digest(presented, caller.digest)]
        return matches[0] if matches else None

    def named(self, name: str) -> Caller | None:
        """Return the caller of this name, or None."""
        return next((caller for caller in self._callers if caller.name == name), None)

    @property
    def any_admin(self) -> bool:
        """Whether a key is marked as the administrators'. If none is, every key opens the administrators' routes."""
        return any(caller.admin for caller in self._callers)

    @contextmanager
    def visit(self, caller: Caller | None) -> Iterator[None]:
        """Count a request of this caller while the block runs, and set `CALLER` to the caller in it. None is not
        counted.

        Raises OverloadedError when one of the caller's limits is reached.
        """
        if caller is None:
            yield
            return
        self._check_limits(caller)
        self._add(caller.name, OPEN, 1)
        token = CALLER.set(Visit(self, caller.name))
        try:
            yield
        finally:
            CALLER.reset(token)
            self._add(caller.name, OPEN, -1)

    def spend(self, name: str, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        number = self._known.get(name)
        if number is None:
            return
        minute = self._clock() // _MINUTE
        if self._board.mine(caller_cell(number, SPENT_IN)) != minute:
            self._board.put(caller_cell(number, SPENT), 0.0)
            self._board.put(caller_cell(number, SPENT_IN), minute)
        self._board.add(caller_cell(number, SPENT), tokens)

    def _check_limits(self, caller: Caller) -> None:
        number = self._known[caller.name]
        if caller.max_requests is not None:
            running = self._board.total(caller_cell(number, OPEN))
            # what is done in the background leaves the caller itself a place, if there are two
            places = max(1, caller.max_requests - BACKGROUND.get())
            if running >= places:
                raise OverloadedError(f"This API key has {running} requests in progress, which is its limit.")
        if caller.tokens_per_minute is not None:
            minute, rest = divmod(self._clock(), _MINUTE)
            rows = range(self._board.rows)
            spent = sum(
                self._board.get(caller_cell(number, SPENT), row)
                for row in rows
                if self._board.get(caller_cell(number, SPENT_IN), row) == minute
            )
            if spent >= caller.tokens_per_minute:
                raise OverloadedError(
                    f"This API key has used {spent:.0f} of its {caller.tokens_per_minute} tokens a minute.",
                    retry_after=max(1, round(_MINUTE - rest)),
                )

    def _add(self, name: str, which: int, value: float) -> None:
        if (number := self._known.get(name)) is not None:  # it may be gone from the file
            self._board.add(caller_cell(number, which), value)

    def _renumber(self, names: Sequence[str]) -> None:
        """Give each key the number of its place in the file, and move this process's figures to the new numbers.

        Each process moves only the figures that it wrote itself; all processes have read the same file.
        """
        cells = (OPEN, SPENT_IN, SPENT)
        former = {
            name: [self._board.mine(caller_cell(number, which)) for which in cells]
            for name, number in self._known.items()
        }
        self._known = {name: number for number, name in enumerate(names)}
        for number in range(max(len(former), len(names))):
            values = former.get(names[number], ()) if number < len(names) else ()
            for which, value in zip(cells, values or (0.0, 0.0, 0.0), strict=True):
                self._board.put(caller_cell(number, which), value)


class Visit:
    """A caller while one of its requests is served."""

    def __init__(self, callers: Callers, name: str) -> None:
        self._callers = callers
        self.name = name

    @property
    def has_others(self) -> bool:
        """Whether the server has more keys than this one."""
        return len(self._callers) > 1

    def spend(self, tokens: int) -> None:
        self._callers.spend(self.name, tokens)


# Set by the frame around every request with an API key. It is not an argument, so that a router cannot forget to pass
# on whose request it is.
CALLER: ContextVar[Visit | None] = ContextVar("ferrule.caller", default=None)

# True while a request is served that the server sends itself, such as a line of a batch: those of clients come first.
BACKGROUND: ContextVar[bool] = ContextVar("ferrule.background", default=False)


def read_file(file: Path) -> list[Caller]:
    """Return the keys of a file. Raises ConfigError; no message has a key in it."""
    # imported here, because it brings yaml: most servers have no such file
    from ferrule.yaml_text import YamlError, read_yaml, value_of

    where = f"--api-key-file {file}"
    try:
        root = read_yaml(file, "file of keys")
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from None
    except CheckpointError as error:
        raise ConfigError(f"--api-key-file: {error.message}") from None
    except YamlError as error:
        place = "" if error.line is None else f", line {error.line}"
        raise ConfigError(f"{where}{place}: {error.problem}.") from None
    content = None if root is None else value_of(root)
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must have an entry for each key: NAME: KEY.")
    return [_caller(name, entry, where) for name, entry in content.items()]


def _caller(name: Any, entry: Any, where: str) -> Caller:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has up to 64 letters, digits, '.', '_' and '-'.")
    if not isinstance(entry, Mapping):
        entry = {"key": entry}
    try:
        found = msgspec.convert(entry, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {name}: {error}. Quote a key that YAML takes for a number.") from None
    if (found.key is None) == (found.sha256 is None):
        raise ConfigError(f"{where}: {name} needs either key or sha256.")
    digest = _digest(found.key.strip().encode()) if found.key is not None else bytes.fromhex(found.sha256 or "")
    return Caller(name, digest, found.max_requests, found.tokens_per_minute, found.admin)


def _check(callers: Sequence[Caller], file: str | None) -> None:
    if len(callers) > MAX_CALLERS:
        raise ConfigError(f"There are {len(callers)} API keys; at most {MAX_CALLERS} are taken.")
    for what in ("name", "digest"):
        values = [getattr(caller, what) for caller in callers]
        twice = [caller.name for caller in callers if values.count(getattr(caller, what)) > 1]
        if twice:
            kind = "the same name" if what == "name" else "the same key"
            raise ConfigError(f"--api-key-file {file}: two entries have {kind}: {', '.join(sorted(set(twice)))}.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
