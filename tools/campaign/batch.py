"""Batch files: killed in the middle, full disks, ids twice: ``python -m tools.campaign.batch [--quick]``.

`ferrule run-batch` is killed with SIGKILL again and again, and started with the same command; later its disk is full (a
limit on the size of files makes a write fail in the middle as that does). Its results are those of a run that nothing
disturbed: each line once, ids that come twice refused. The output is not visible before it is whole, and no other file
is left.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.campaign.running import options, simulated, verdict

_SECONDS = 120.0  # for one run, at most
_TWICE = 20  # every so many rows have the id of another one


def row(number: int) -> bytes:
    """Return one line of the input; some have an id twice, some are torn, some ask for what is refused."""
    custom_id = f"row-{number - 1}" if number % _TWICE == 7 else f"row-{number}"
    body: dict[str, Any] = {"prompt": f"Count to {number}:", "max_tokens": 8 + number % 9, "seed": number}
    if number % 50 == 13:
        return b'{"custom_id": "torn'
    if number % 50 == 33:
        body["max_tokens"] = -1
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode()


def command(source: Path, target: Path, step_seconds: float) -> list[str]:
    words = [sys.executable, "-m", "ferrule", "run-batch", "-i", str(source), "-o", str(target)]
    return [*words, "--disable-log-stats", "--max-inflight", "8", *simulated(step_seconds)[:-1]]


def finished(source: Path, target: Path, limit: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a batch to its end."""
    words = command(source, target, 0.0)
    return subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False, preexec_fn=limit)


def journalled(target: Path) -> int:
    """Count the whole rows in the journal; its first line is about the run."""
    journal = target.with_name(f"{target.name}.journal")
    return max(journal.read_bytes().count(b"\n") - 1, 0) if journal.exists() else 0


def killed(source: Path, target: Path, rows: int) -> bool:
    """Start a run, and kill it when it has so many rows more; whether it was still running."""
    least, end = journalled(target) + rows, time.monotonic() + _SECONDS
    with subprocess.Popen(command(source, target, 0.01), stdout=-3, stderr=-3, stdin=-3) as process:
        try:
            while journalled(target) < least and process.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
            return process.poll() is None
        finally:
            process.kill()


def gists(target: Path) -> list[tuple[Any, ...]]:
    """Return what two runs have in common: everything but ids and times."""
    found = []
    for line in target.read_bytes().splitlines():
        said = json.loads(line)
        body = said["response"]["body"]
        texts = [choice["text"] for choice in body.get("choices", ())]
        found.append((said["custom_id"], said["response"]["status_code"], json.dumps(said["error"]), *texts))
    return found


def interrupted(source: Path, target: Path, kills: int, expected: Sequence[tuple[Any, ...]]) -> tuple[int, list[str]]:
    """Return how often the run was killed, and the problems of the results afterwards."""
    rng, number, problems, count = random.Random(5), 0, [], len(expected)
    while number < kills and killed(source, target, rng.randrange(1, max(2, count // (2 * kills)))):
        number += 1
        if target.exists():
            problems.append("the output is there before the run has ended")
        with target.with_name(f"{target.name}.journal").open("ab") as journal:
            journal.write(rng.choice((b"", b"9", b'9999 200 {"id":"batch_req_')))  # what a power cut may leave
    problems += compared("killed", finished(source, target), target, expected)
    return number, problems


def full_disk(source: Path, target: Path, expected: Sequence[tuple[Any, ...]], size: int) -> tuple[int, list[str]]:
    """Return how many rows were kept when a file could not grow beyond `size` bytes, and the problems then and
    afterwards.
    """
    done = finished(source, target, functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)))
    kept, problems = journalled(target), []
    if done.returncode != 1 or "Cannot write" not in done.stderr or "Traceback" in done.stderr or target.exists():
        problems.append(f"full disk: status {done.returncode}, {done.stderr[-300:]}")
    if not 0 < kept < len(expected):
        problems.append(f"full disk: {kept} of {len(expected)} rows are kept")
    return kept, problems + compared("full disk", finished(source, target), target, expected)


def compared(
    name: str, done: subprocess.CompletedProcess[str], target: Path, expected: Sequence[tuple[Any, ...]]
) -> list[str]:
    """Return the problems of the last run's results."""
    if done.returncode or not target.exists():
        return [f"{name}: the last run ended with status {done.returncode}: {done.stderr[-300:]}"]
    problems, found = [], gists(target)
    if found != expected:
        wrong = sum(one != other for one, other in zip(found, expected, strict=False))
        problems.append(f"{name}: {len(found)} results of {len(expected)}, {wrong} of them differ")
    left = {path.name for path in target.parent.iterdir()} - {target.name}
    return problems + [f"{name}: left behind: {path}" for path in sorted(left)]


def run(count: int, kills: int, folder: Path) -> int:
    source = folder / "in.jsonl"
    source.write_bytes(b"".join(row(number) + b"\n" for number in range(count)))
    targets = [folder / name / "out.jsonl" for name in ("peaceful", "killed", "full")]
    for target in targets:
        target.parent.mkdir()
    done = finished(source, targets[0])
    if done.returncode:
        return verdict("the run that nothing disturbed failed", [done.stderr[-600:]])
    expected = gists(targets[0])
    codes = Counter(json.loads(error)["code"] for _, _, error, *_ in expected if error != "null")
    problems = [] if len(expected) == count else [f"{len(expected)} results of {count} rows"]
    twice = sum(number % _TWICE == 7 and number % 50 not in {13} for number in range(count))
    if codes["duplicate_custom_id"] != twice:
        problems.append(f"{codes['duplicate_custom_id']} ids twice are refused, of {twice}")
    number, wrong = interrupted(source, targets[1], kills, expected)
    problems += wrong
    if number < kills:
        problems.append(f"only {number} of {kills} times it was running when it was to be killed")
    kept, wrong = full_disk(source, targets[2], expected, targets[0].stat().st_size // 2)
    problems += wrong
    print(f"{count} rows, refused {dict(codes)}; with the disk full {kept} rows were kept")
    figures = f"{count} rows, killed {number} times and a full disk: 0 lost, 0 twice (bound 0)"
    return verdict(
        f"{figures if not problems else f'{count} rows, killed {number} times'}; {twice} ids twice refused", problems
    )


def main(argv: Sequence[str]) -> int:
    count, kills = (200, 3) if options("batch", __doc__, argv) else (2000, 20)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="batch-") as folder:
        return run(count, kills, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
