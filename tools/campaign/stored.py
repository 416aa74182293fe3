"""Stored responses, bounded and over restarts: ``python -m tools.campaign.stored [--quick] [bounds | restarts]``.

bounds: clients store many more responses than a store keeps, by count, by bytes and by age, whole, in the background
and with their streams, in memory and in a file. There are never more than the bounds allow, the newest are there, those
that went are a 404 on every route, the file has its size, and the processes' memory is on a plateau.

restarts: all processes of a server with two API processes are killed with SIGKILL while responses are stored, streamed
and cancelled. After each start every response that a client was told of has ended, as it was told if its end was told,
and its stream ends as it does. In the end the disk is full (a limit on the size of files makes a write fail as that
does): what stores is answered 500, other requests as before, and behind the next start everything is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ferrule_testkit import server as servers
from tools.campaign.again import kill
from tools.campaign.liveness import request
from tools.campaign.running import (
    Answer,
    Figures,
    Target,
    attacked,
    exchange,
    growths,
    post,
    reference,
    say,
    simulated,
    sizes,
    strict_limits,
    tracebacks,
    verdict,
)

_PATH = "/v1/responses"
_COUNT, _BYTES, _AGE = 30, 256 << 10, 2.0  # the bounds: responses, bytes, seconds
_LABELS = 16  # of a large response, 512 bytes each
_AT_ONCE = 16  # clients
_SPARE = 1 << 20  # bytes that the file may have beside the responses
_ROOM = 64 << 10  # bytes that a full disk still has for each file
_MOST = 1000  # responses that fit there, at most: the log of the database is used again when it has 4 MiB
_LAST = {"response.completed", "response.incomplete", "response.failed"}
_ASKED: Mapping[str, Any] = {"input": "one two three", "max_output_tokens": 8, "seed": 7}


def store(**values: Any) -> list[str]:
    """Return the options of a server whose store has these: a file where there is a `path`."""
    name = "sqlite" if "path" in values else "memory"
    return ["--response-store", name, "--plugin-config", f"response_store:{name}={json.dumps(values)}"]


async def ask(port: int, path: str, method: str = "GET") -> Answer:
    return await say(port, request(f"{_PATH}/{path}").replace(b"GET", method.encode(), 1))


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the whole events of a stream, which may be cut off."""
    blocks = stream.split(b"\n\n")[:-1]
    return [json.loads(block.partition(b"data: ")[2]) for block in blocks if b"data: {" in block]


def kind_of(number: int) -> dict[str, bool]:
    """Return how response `number` is made: every third in the background, half of these with a stream."""
    return {"background": number % 3 == 0, "stream": number % 6 == 0}


# ------------------------------------------------------------------------------------------------ bounds


async def made(port: int, number: int, labels: int = 0) -> str:
    """Store a response, and return its id. Raises RuntimeError."""
    metadata = {str(label): "x" * 512 for label in range(labels)}
    status, answer = await post(port, {**_ASKED, **kind_of(number), "metadata": metadata}, _PATH)
    if status != 200:
        raise RuntimeError(f"a response is answered {status}: {answer[:200]!r}")
    told = events(answer)[0]["response"] if kind_of(number)["stream"] else json.loads(answer)
    return str(told["id"])


async def flood(target: Target, count: int, labels: int, path: Path | None) -> Figures:
    """Store `count` responses, and as many again, whose labels decide which bound is met."""
    port, most = target.port, _BYTES // (512 * labels) if labels else _COUNT
    name = f"{'memory' if path is None else 'file'}, {'large' if labels else 'small'} ones"
    for _ in range(2):
        before, ids = sizes(target), list[str]()
        for first in range(0, count, _AT_ONCE):
            ids += await asyncio.gather(*(made(port, first + each, labels) for each in range(_AT_ONCE)))
    answers = [(await ask(port, each))[0] for each in ids]
    kept, problems = answers.count(200), []
    if set(answers) - {200, 404} or not 0 < kept <= most or 404 in answers[-min(kept, _AT_ONCE) :]:
        problems.append(f"{name}: {dict(Counter(answers))}, at most {most} may be there, and the newest must be")
    for more, method in (
        ("", "GET"),
        ("?stream=1", "GET"),
        ("/input_items", "GET"),
        ("/cancel", "POST"),
        ("", "DELETE"),
    ):
        status, answer = await ask(port, f"{ids[0]}{more}", method)
        if status != 404 or b"deleted or too old" not in answer:
            problems.append(f"{name}: {method} {more} of one that went is answered {status}: {answer[:100]!r}")
    status, answer = await post(port, {**_ASKED, "previous_response_id": ids[0]}, _PATH)
    if status != 404:
        problems.append(f"{name}: one that went is continued with {status}: {answer[:100]!r}")
    shown, grown = growths(before, sizes(target))
    size = 0 if path is None else path.stat().st_size
    if size > _BYTES + _SPARE:
        problems.append(f"{name}: the file has {size} bytes, for {_BYTES}")
    print(f"{name}: {kept} of the last {count} kept (bound {most}), file {size >> 10} KiB, {shown}", flush=True)
    return f"{name}: {kept} kept (bound {most})", [*problems, *(f"{name}: {each}" for each in grown)]


async def age(target: Target) -> Figures:
    """Ask for a response at once, and when it is too old."""
    name = await made(target.port, 1)
    young, _ = await ask(target.port, name)
    await asyncio.sleep(_AGE + 1)  # an age counts from a whole second
    old, _ = await ask(target.port, name)
    return "too old: 404", [] if (young, old) == (200, 404) else [f"answered {young}, and when too old {old}"]


def bounds(quick: bool, folder: Path) -> list[Figures]:
    count, found = _AT_ONCE * (3 if quick else 100), list[Figures]()
    for name, file in (("memory", None), ("file", folder / "bounds.sqlite")):
        where = {} if file is None else {"path": str(file)}

        async def both(target: Target, file: Path | None = file) -> Figures:
            small, large = [await flood(target, count, labels, file) for labels in (0, _LABELS)]
            return f"{small[0]}; {large[0]}", [*small[1], *large[1]]

        options = [*simulated(), *store(max_responses=_COUNT, max_bytes=_BYTES, **where)]
        found.append(attacked(both, options, folder / f"log-{name}", strict_limits()))
        if not (quick and file is None):  # the test kit asks both
            options = [*simulated(), *store(max_age=_AGE, **where)]
            found.append(attacked(age, options, folder / f"log-age-{name}", strict_limits()))
    return found


# ------------------------------------------------------------------------------------------------ restarts


async def work(port: int, number: int, told: dict[str, Any]) -> None:
    """Store response after response until the server dies. `told` is filled with what is known of each, by its id: the
    response as its end was told, or None.
    """
    while True:
        how = kind_of(number)
        body = {**_ASKED, **how, "max_output_tokens": 8 + number % 64}
        answer = await exchange(port, request(_PATH, json.dumps(body).encode()))
        text = answer.partition(b"\r\n\r\n")[2]
        try:
            said = (
                [each["response"] for each in events(text) if "response" in each]
                if how["stream"]
                else [json.loads(text)]
            )
        except ValueError:
            return  # it is cut off
        if not answer or not said:
            return
        ended = said[-1]["status"] in {"completed", "incomplete"}
        told[said[-1]["id"]] = said[-1] if ended else None
        if not ended and number % 2:
            status, text = await ask(port, f"{said[-1]['id']}/cancel", "POST")
            if status == 200:
                told[said[-1]["id"]] = json.loads(text)
        number += _AT_ONCE


async def checked(port: int, told: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the responses of former servers."""
    problems = []
    for name, end in told.items():
        status, text = await ask(port, name)
        found = json.loads(text) if status == 200 else {"status": f"answered {status}"}
        if found["status"] not in {"completed", "incomplete", "failed", "cancelled"}:
            problems.append(f"a response is {found['status']} after a restart")
        elif end is not None and found != end:
            problems.append(f"a response was told as {end['status']}, and is another one, {found['status']}")
        status, text = await ask(port, f"{name}?stream=true")
        stream = events(text) if status == 200 else []
        if [each["sequence_number"] for each in stream] != list(range(len(stream))):
            problems.append("a stream has gaps after a restart")
        ends = [each["response"] for each in stream if each["type"] in _LAST]
        if stream and found["status"] != "cancelled" and ends != [found]:
            problems.append(f"a stream has {len(ends)} ends, or another than its response, {found['status']}")
    return problems


async def until_killed(server: servers.Server, count: int, told: dict[str, Any]) -> None:
    """Kill a server that has told clients of `count` responses more."""
    most, deadline = len(told) + count, time.monotonic() + servers.PATIENCE
    works = [asyncio.create_task(work(server.port, number, told)) for number in range(_AT_ONCE)]
    while len(told) < most and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(kill, server)
    await asyncio.gather(*works)


def fill_disk(server: servers.Server, size: int) -> None:
    """Limit the files of a server's processes to so many bytes."""
    for pid in servers.descendants(server.process.pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def full(port: int) -> tuple[list[str], dict[str, Any]]:
    """Store until the disk is full. Return the problems, and what was told of each response."""
    problems, told, statuses = list[str](), dict[str, Any](), Counter[int]()
    large = {str(label): "x" * 512 for label in range(_LABELS)}
    while statuses[500] < _AT_ONCE and statuses.total() < _MOST:
        status, text = await post(port, {**_ASKED, "background": statuses.total() % 3 == 0, "metadata": large}, _PATH)
        statuses[status] += 1
        if status == 200:
            said = json.loads(text)
            told[said["id"]] = None if said["background"] else said
        elif status != 500 or b"The response store failed" not in text:
            problems.append(f"with the disk full, answered {status}: {text[:160]!r}")
    status, text = await post(port, {**_ASKED, "store": False}, _PATH)
    if status != 200 or not statuses[500]:
        problems.append(f"with the disk full {dict(statuses)}, and {status} with store false: {text[:160]!r}")
    await reference(port)
    print(f"full disk: {dict(statuses)}", flush=True)
    return problems, told


def restarts(quick: bool, folder: Path) -> list[Figures]:
    times, file, told = (1 if quick else 10), folder / "restarts.sqlite", dict[str, Any]()
    problems, slowest = list[str](), 0.0
    args = [*simulated(0.005), "--api-server-count", "2", *store(path=str(file), max_responses=100_000)]
    for number in range(times + 2):
        with servers.running(args, folder / f"log-{number}", strict_limits()) as server:
            began = time.monotonic()
            problems += asyncio.run(checked(server.port, told))
            slowest = max(slowest, time.monotonic() - began)
            if number == times:
                fill_disk(server, max(each.stat().st_size for each in folder.glob(f"{file.name}*")) + _ROOM)
                wrong, more = asyncio.run(full(server.port))
                problems, told = problems + wrong, told | more
            elif number < times:
                asyncio.run(until_killed(server, _AT_ONCE * (4 if quick else 20), told))
            elif asyncio.run(post(server.port, _ASKED, _PATH))[0] != 200:
                problems.append("no response is stored after the last start")
            problems += tracebacks(server)
    ended = sum(end is not None for end in told.values())
    figure = f"{times} times killed, and a full disk: {len(told)} responses, {ended} told as ended, are whole or failed"
    return [(figure, problems)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.stored", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller version, of half a minute")
    parser.add_argument("which", nargs="?", choices=("bounds", "restarts"), help="default: both")
    args = parser.parse_args(argv)
    drives = {"bounds": partial(bounds, args.quick), "restarts": partial(restarts, args.quick)}
    with tempfile.TemporaryDirectory(prefix="stored-") as folder:
        chosen = [args.which] if args.which else list(drives)
        found = [each for name in chosen for each in drives[name](Path(folder))]
    return verdict("; ".join(figures for figures, _ in found), [each for _, problems in found for each in problems])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
