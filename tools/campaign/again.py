"""Killed and started again, twenty times: ``python -m tools.campaign.again [--quick]``.

All processes of a server are killed with SIGKILL under load, and a server on the same port follows at once: it binds,
serves, and gives the reference answer. Behind the last one, which ends by itself, neither the folder for temporary
files nor /dev/shm has anything that was not there before. A second server on a port that is taken says why, before it
has loaded anything, and does not disturb the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ferrule_testkit import server as servers
from tools.campaign.running import QUIET, options, post, reference, strict_limits, verdict

_SHM = Path("/dev/shm")
_SOON = 15.0  # seconds in which the second server on a port ends
_BEGINS = "INFO "  # what a server writes once its processes start
_LONG = {"prompt": "one two three", "max_tokens": 400, "ignore_eos": True, "stream": True}


def start(port: int, log: Path, env: Mapping[str, str]) -> servers.Server:
    """Start `ferrule serve` on this port."""
    command = [sys.executable, "-m", "ferrule", "serve", *QUIET, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
    return servers.Server(process, port, log)


def kill(server: servers.Server) -> None:
    """Kill all of a server's processes, at once."""
    for pid in (server.process.pid, *servers.descendants(server.process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()


@contextlib.contextmanager
def ended(server: servers.Server) -> Iterator[servers.Server]:
    """Kill a server at the end of the block, so that no process of it is left."""
    try:
        yield server
    finally:
        if server.process.poll() is None:
            kill(server)


async def _load(port: int) -> None:
    """Start streams that have not ended when this function returns."""
    works = [asyncio.create_task(post(port, _LONG, patience=1.0)) for _ in range(8)]
    await asyncio.sleep(0.3)
    for work in works:
        work.cancel()


def names(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.iterdir()}


def second(port: int, log: Path, env: Mapping[str, str]) -> tuple[float, list[str]]:
    """Return the seconds until a second server on a taken port ended, and its problems."""
    began = time.monotonic()
    with ended(start(port, log, env)) as server:
        try:
            status = server.process.wait(4 * _SOON)
        except subprocess.TimeoutExpired:
            return 4 * _SOON, ["the second server on the port has not ended"]
    took, text, problems = time.monotonic() - began, server.text(), []
    if status not in {1, 2} or "already in use" not in text or "Traceback" in text:
        problems.append(f"the second server on the port ended with status {status}: {text[-300:]}")
    if _BEGINS in text:
        problems.append(f"the second server on the port had begun to start: {text[-300:]}")
    if took > _SOON:
        problems.append(f"the second server on the port ended after {took:.1f} s, at most {_SOON:.0f}")
    return took, problems


def run(times: int, folder: Path) -> int:
    scratch, problems, slowest = folder / "tmp", [], 0.0
    scratch.mkdir()
    env = {**strict_limits(), "TMPDIR": str(scratch)}
    shared = names(_SHM)
    with servers.own_port() as port:
        expected = ""
        for number in range(times + 1):
            began = time.monotonic()
            with ended(start(port, folder / f"log-{number}", env)) as server:
                server.wait_healthy()
                slowest = max(slowest, time.monotonic() - began)
                said = asyncio.run(reference(port))
                expected = expected or said
                if said != expected:
                    problems.append(f"start {number}: another answer")
                if number < times:
                    asyncio.run(_load(port))
                    kill(server)
                    continue
                took, wrong = second(port, folder / "log-second", env)
                problems += wrong
                if asyncio.run(reference(port)) != expected:
                    problems.append("the first server does not answer as before beside a second one")
                if status := server.stop(60):
                    problems.append(f"the last server ended with status {status}")
    left = names(scratch) | (names(_SHM) - shared)
    problems += [f"left behind: {path}" for path in sorted(left)]
    figures = f"{times} times killed and serving again, slowest start {slowest:.1f} s; {len(left)} files left (bound 0)"
    return verdict(f"{figures}; a second server on the port ends after {took:.1f} s (bound {_SOON:.0f})", problems)


def main(argv: Sequence[str]) -> int:
    times = 3 if options("again", __doc__, argv) else 20
    with tempfile.TemporaryDirectory(prefix="again-") as folder:
        return run(times, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
