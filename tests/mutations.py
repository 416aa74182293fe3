"""Damaged files for parsers: whatever is in a file, it is read or it is one clear error."""

from __future__ import annotations

import json
import logging
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ferrule.errors import CheckpointError

HUGE = 1 << 63
SECONDS = 60  # for one file: far more than any takes, so that only an endless loop is interrupted
MEMORY = 256 << 10  # KiB that a hundred thousand files may add to the process
Mutation = Callable[[bytes, random.Random], bytes]
# What a JSON file may have in place of any other value.
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 7, 128, 2**31, 2**63, 10**12, 10**40, -(10**40), 0.5, -1.5),
    *(1e308, float("nan"), float("inf")),
    *("", "x", "*" * 5000, "(a+)+$", "[", "\ud800", "\0", "..", "/etc/passwd", "{{ x }}", "0"),
    *([], [None], [[[]]], [0, 0], ["x"] * 50, {}, {"a": 1}, {"a": {"type": {}}}, {"content": []}),
]


class Late(BaseException):
    """A timeout that is not an Exception: parsers make errors of those."""


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """Change a few bytes, lengths and counts preferred, or leave out, double or cut off a piece."""
    content = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content))
        match draw.randrange(5):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                content[at : at + 8] = struct.pack(
                    "<Q", draw.choice((0, 1, 255, 1 << 31, 1 << 32, 1 << 62, HUGE, HUGE * 2 - 1))
                )
            case 2:
                del content[at : at + draw.randint(1, 16)]
            case 3:
                content[at:at] = content[at : at + draw.randint(1, 64)]
            case 4:
                del content[at:]
        if not content:
            break
    return bytes(content)


def rewritten(whole: bytes, draw: random.Random) -> bytes:
    """Return JSON with other values, with keys that are missing or new; one of eight is damaged as text."""
    if not draw.randrange(8):
        return mutated(whole, draw)
    value = json.loads(whole)
    for _ in range(draw.randint(1, 3)):
        value = _changed(value, draw)
    return json.dumps(value).encode()


def _changed(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        match draw.randrange(12):
            case 0:
                return {name: kept for name, kept in value.items() if name != key}
            case 1:
                return {**value, draw.choice((f"{key}x", "", "0", "-1", "\ud800")): value[key]}
            case _:
                return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        match draw.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.3:
        return value + draw.choice((-1, 1, 2))
    return draw.choice(VALUES)


def headed(whole: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file whose JSON has other values, and the right length."""
    size = int.from_bytes(whole[:8], "little")
    head = rewritten(whole[8 : 8 + size], draw)
    return len(head).to_bytes(8, "little") + head + whole[8 + size :]


def fuzz(
    place: Path,
    whole: bytes,
    read: Callable[[Path], object],
    count: int,
    seed: int,
    mutate: Mutation = mutated,
    refusals: type[Exception] | tuple[type[Exception], ...] = CheckpointError,
) -> int:
    """Return how many of `count` mutations are still read. Anything but one of the `refusals` is a failure. So is a
    file that takes longer than a minute.
    """
    draw, survived = random.Random(seed), 0
    with _interrupted() as begin:
        for _ in range(count):
            place.unlink(missing_ok=True)  # a new file: a mapping of the last one may still be held
            place.write_bytes(mutate(whole, draw))
            begin()
            try:
                read(place)
            except refusals:
                continue
            survived += 1
    return survived


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail where the process has grown by more than `MEMORY`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


@contextmanager
def _interrupted() -> Iterator[Callable[[], object]]:
    """Yield a function that restarts the clock. Until the block ends, a test's own limit of time is not counted, and
    nothing is logged.
    """

    def late(number: int, frame: Any) -> None:
        raise Late(f"a file took more than {SECONDS} seconds")

    logged = logging.root.manager.disable
    logging.disable()  # a test keeps all that is logged while it runs
    left = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, late)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, SECONDS)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)
        logging.disable(logged)
