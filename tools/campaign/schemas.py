"""Distinct schemas and regular expressions, 20,000 of them: ``python -m tools.campaign.schemas [--quick]``.

Each is compiled once and used for one answer. The memory of each process comes to a plateau: the second half of the
run adds no more than 5 % + 64 MiB. And nothing is written: the folders for temporary and cached files, which the server
is given for itself, stay as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tools.campaign.running import (
    QUIET,
    Figures,
    Target,
    attacked,
    growths,
    options,
    post,
    quiet,
    reference,
    sizes,
    strict_limits,
    verdict,
)

_CLIENTS = 8
_SECONDS = 520.0  # after which a run stops, however many there were


def constraint(number: int) -> Mapping[str, Any]:
    """Return a constraint unlike that of any other number: small and large schemas, with patterns, and regular
    expressions.
    """
    if number % 4 == 0:
        return {"guided_regex": f"[a-f]{{1,{number % 7 + 1}}}-{number}-(x|y|z)[0-9]?"}
    names = [f"name-{number}-{place}" for place in range(1 + number % 12)]
    kinds: tuple[Mapping[str, Any], ...] = (
        {"enum": ["a", f"b{number}"]},
        {"type": "integer", "minimum": 0, "maximum": number},
        {"type": "string", "maxLength": 3 + number % 5},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    )
    properties = {name: kinds[place % len(kinds)] for place, name in enumerate(names)}
    return {"guided_json": {"type": "object", "properties": properties, "required": names[:1]}}


@dataclass
class Seen:
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def ask(port: int, numbers: range, seen: Seen, end: float) -> None:
    """Get an answer for each number, until the time ends."""
    left = iter(numbers)

    async def client() -> None:
        for number in left:
            if time.monotonic() > end:
                return
            asked = {"prompt": "JSON:", "max_tokens": 4, "temperature": 0, **constraint(number)}
            status, body = await post(port, asked)
            seen.statuses[status] += 1
            if status != 200:
                seen.problems.append(f"{status}: {body[:160]!r} to {json.dumps(asked)[:300]}")

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))


async def measure(server: Target, folder: Path, count: int) -> Figures:
    """Measure the growth of a server: the first half of the requests fills the caches. Nothing may be written to the
    folder.
    """
    seen, began = Seen(), time.monotonic()
    files = listing(folder)
    await ask(server.port, range(8), seen, began + _SECONDS)
    start, expected = sizes(server), await reference(server.port)
    await ask(server.port, range(8, count // 2), seen, began + _SECONDS / 2)
    half = sizes(server)
    await ask(server.port, range(count // 2, count), seen, began + _SECONDS)
    _, left = await quiet(server)
    end = sizes(server)
    first, _ = growths(start, half)
    second, wrong = growths(half, end)
    print(f"{time.monotonic() - began:.0f} s, {dict(seen.statuses)}; first half: {first}")
    problems = [*seen.problems, *wrong, *([f"left behind: {left}"] if left else [])]
    if await reference(server.port) != expected:
        problems.append("the reference answer is another one")
    new = written(folder, files)
    problems += [f"written: {path.relative_to(folder)}" for path in new]
    figures = f"{seen.statuses.total()} distinct constraints; second half: {second} (bound 5 % + 64 MiB)"
    return f"{figures}; {len(new)} files written (bound 0)", problems


def written(folder: Path, since: Mapping[Path, int]) -> list[Path]:
    """Return the files below a folder that are new or larger."""
    return [path for path, size in listing(folder).items() if size > since.get(path, -1)]


def listing(folder: Path) -> dict[Path, int]:
    """Return the regular files below a folder with their sizes."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found[path] = path.stat().st_size
    return found


def main(argv: Sequence[str]) -> int:
    count = 300 if options("schemas", __doc__, argv) else 20_000
    with tempfile.TemporaryDirectory(prefix="schemas-") as name:
        folder = Path(name)
        places = {word: folder / word.lower() for word in ("TMPDIR", "XDG_CACHE_HOME")}
        for place in places.values():
            place.mkdir()
        env = {**strict_limits(), **{word: str(place) for word, place in places.items()}}
        log, args = folder.parent / f"{folder.name}.log", [*QUIET, "--max-model-len", "256"]
        figures, problems = attacked(partial(measure, folder=folder, count=count), args, log, env)
        log.unlink()
    return verdict(figures, problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
