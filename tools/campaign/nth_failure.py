"""Fail one call of a server, the Nth of its kind, and see what it comes to: ``python -m tools.campaign.nth_failure``.

The calls are those of the launcher, the engine, an API process or the helper process of an API process: allocations of
16 KiB and more, descriptors (files, sockets, pipes), sends to sockets, starts of processes, and starts of threads. A
library that is loaded before all others counts them, and makes one fail (``nth_shim.c``; it is compiled with ``cc``).
Without a fault the calls are counted; then N takes values from 1 to that count, evenly spaced, in two phases:

- start: from a process's first moment to the end of the server's first twenty requests. Each try is a start of its own;
  the executor is the simulated one but where the engine is struck.
- serve: during twenty later requests to a server with the embedded model. It goes on to the next try when it still
  answers as before.

A try must come to one of these: everything is right; requests get an error, or their connection is cut, and the server
is right afterwards; it exits with a status that is not 0, and within 15 s all its processes are gone. A request or a
server that hangs, wrong text, exit status 0, and a process that survives are failures, and the command's status is then
1. Two outcomes are shown and do not count as failures: "traceback" is a start that ends with one, "other kernels" an
engine that says that it computes without compiled kernels, whose results round differently. The last line is the sum.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ferrule_contrib import tiny
from ferrule_testkit import server as servers
from tools.campaign.nth_scenario import ERROR, FORBIDDEN, HANG, OK, WRONG, Scenario
from tools.campaign.nth_shim import CLASSES, ERRORS, ROLES, Cell, Shim, build

EXIT, TRACEBACK, MISSED, OTHER = "exit", "traceback", "not reached", "other kernels"
_NO_KERNELS = "refused: the kernels"  # in the log, where the engine computes with torch, which rounds in another way
EXIT_0, SURVIVES = "EXIT 0", "PROCESS SURVIVES"
FAILURES = (*FORBIDDEN, EXIT_0, SURVIVES)
QUICK, FULL = (1, 2), (6, 16)  # tries of each kind of call, at a start and during requests
_EXIT_SECONDS = 15.0
_START_SECONDS = 90.0
_ARGS = (
    *(str(tiny.path()), "--served-model-name", "tiny", "--engine-restarts", "0", "--watchdog-timeout", "10"),
    "--disable-uvicorn-access-log",
)
_ENV = {
    "OMP_NUM_THREADS": "1",
    "FERRULE_TEMPLATE_TIMEOUT": "10",
    "FERRULE_KEEP_ALIVE_TIMEOUT": "10",
    "FERRULE_SHUTDOWN_TIMEOUT": "10",
}


@dataclass
class Row:
    """The results of the tries of one kind of call. `notes` are of those that a reader wants to see."""

    phase: str
    cell: Cell
    hits: int
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, nth: int, outcome: str, where: str, log: str) -> None:
        self.outcomes[outcome] += 1
        if outcome in (*FAILURES, TRACEBACK):
            tail = "".join(f"\n      | {line}" for line in log.splitlines()[-12:])
            self.notes.append(f"    {outcome} at N = {nth}: {where}{tail}")

    @property
    def failures(self) -> int:
        return sum(self.outcomes[name] for name in FAILURES)

    def line(self) -> str:
        tried = sum(self.outcomes.values())
        ends = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        name = f"{self.phase} {self.cell.role} {self.cell.kind}"
        return f"{name:26} hits {self.hits:6}  tried {tried:3}  failures {self.failures}  {ends}"


def spread(hits: int, tries: int) -> list[int]:
    """Return at most `tries` numbers from 1 to `hits`, evenly spaced."""
    tries = min(hits, tries)
    return [1 + (2 * number + 1) * hits // (2 * tries) for number in range(tries)]


def error_of(cell: Cell, number: int) -> int:
    """Return the error of a cell's try by its number."""
    errors = ERRORS[cell.kind]
    return errors[number % len(errors)]


class Run:
    """One server under the shim, in an empty folder of its own."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.shim = Shim(library, folder)
        self.log = folder / "log"
        self._mark = self.shim.env["NTH_FILE"].encode()

    @contextlib.contextmanager
    def started(self, args: Sequence[str] = ()) -> Iterator[None]:
        """Run the server for the length of a block, from its first moment on. At the end it is stopped, and killed if
        it is not well.
        """
        with servers.started([*_ARGS, *args], self.log, {**_ENV, **self.shim.env}) as self.server:
            try:
                yield
            finally:
                self.shim.disarm()
                if not self.ended and self.server.health() != 200:
                    self.kill()
        self.kill()

    def pids(self) -> list[int]:
        """Return the ids of all its processes that run, whoever their parents are."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return self.server.process.poll() is not None

    def come_up(self) -> bool:
        """Wait until it is healthy or has ended; False if it does neither."""
        return servers.until(lambda: self.ended or self.server.health() == 200, _START_SECONDS)

    def exit(self) -> str:
        """Return the outcome of a server that has ended."""
        if not servers.until(lambda: not self.pids(), _EXIT_SECONDS):
            return SURVIVES
        return EXIT if self.server.process.returncode else EXIT_0

    def strike(self, scenario: Scenario, cell: Cell | None = None, nth: int = 0, error: int = 0) -> str:
        """Fail one call during the requests, and see what they and the server come to."""
        self.shim.arm(cell, nth, error)
        outcome = self.serves(scenario)
        return MISSED if outcome == OK and cell is not None and not self.shim.failed else outcome

    def serves(self, scenario: Scenario) -> str:
        """Run the requests, and return the outcome of them and of the server after them."""
        ends = scenario.run(self.server.url)
        for name in FORBIDDEN:
            if ends[name]:
                return name
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline:
            if self.ended:
                return self.exit()
            probe = scenario.probe(self.server.url)
            if probe in FORBIDDEN:
                return probe
            if probe == OK and self.server.health() == 200:
                return OK if set(ends) == {OK} else ERROR
            time.sleep(0.2)
        return HANG


class Campaign:
    """A campaign on servers that are started as they are needed; `tries` are those of each cell at a start and during
    requests.
    """

    def __init__(self, library: Path, cells: Sequence[Cell], tries: tuple[int, int]) -> None:
        self._library, self._cells = library, cells
        self._starts, self._serves = tries
        self._scenarios: dict[tuple[str, ...], Scenario] = {}

    def _enter(self, place: contextlib.ExitStack, args: tuple[str, ...], count: bool = False) -> Run:
        """Start a healthy server without a fault. With `count` the calls of its start are counted."""
        run = Run(self._library, Path(place.enter_context(tempfile.TemporaryDirectory(prefix="nth-"))))
        if count:
            run.shim.arm()
        place.enter_context(run.started(args))
        if not run.come_up() or run.ended:
            raise RuntimeError(f"A server without a fault does not start:\n{run.server.text()}")
        if args not in self._scenarios:
            self._scenarios[args] = Scenario(run.server.url, args == servers.WITHOUT_MODEL)
        elif count:
            run.serves(self._scenarios[args])
        run.shim.disarm()
        return run

    def serve(self, args: tuple[str, ...] = ()) -> Iterator[Row]:
        """Yield a row for each cell that is hit during requests. `args` are added to the server's."""
        with contextlib.ExitStack() as live:
            run, scenario = self._enter(live, args), self._scenarios[args]
            run.strike(scenario)
            hits = run.shim.hits
            for cell in self._cells:
                row = Row("serve", cell, hits[cell])
                for number, nth in enumerate(spread(row.hits, self._serves)):
                    if run.ended:
                        live.close()
                        run = self._enter(live, args)
                    outcome = run.strike(scenario, cell, nth, error_of(cell, number))
                    row.add(nth, outcome, run.shim.where, run.server.text())
                    if outcome not in (OK, ERROR, MISSED) and not run.ended:
                        run.kill()
                        run.server.process.wait()
                if row.hits:
                    yield row

    def start(self) -> Iterator[Row]:
        """Yield a row for each cell that is hit by a start."""
        counted: dict[tuple[str, ...], dict[Cell, int]] = {}
        for cell in self._cells:
            args = () if cell.role == "engine" else servers.WITHOUT_MODEL
            if args not in counted:
                with contextlib.ExitStack() as place:
                    counted[args] = self._enter(place, args, count=True).shim.hits
            row = Row("start", cell, counted[args][cell])
            for number, nth in enumerate(spread(row.hits, self._starts)):
                row.add(nth, *self._started(args, cell, nth, error_of(cell, number)))
            if row.hits:
                yield row

    def _started(self, args: tuple[str, ...], cell: Cell, nth: int, error: int) -> tuple[str, str, str]:
        """Start once. The outcome, the call that failed, and the log."""
        with tempfile.TemporaryDirectory(prefix="nth-") as folder:
            run = Run(self._library, Path(folder))
            run.shim.arm(cell, nth, error)
            with run.started(args):
                if not run.come_up():
                    outcome = HANG
                elif not run.ended:
                    outcome = run.serves(self._scenarios[args])
                    if outcome == OK and not run.shim.failed:
                        outcome = MISSED
                    elif outcome == WRONG and _NO_KERNELS in run.server.text():
                        outcome = OTHER
                elif (outcome := run.exit()) == EXIT and "Traceback" in run.server.text():
                    outcome = TRACEBACK
            return outcome, run.shim.where, run.server.text()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.nth_failure", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tries: about two minutes, not twenty")
    parser.add_argument("--phase", choices=("start", "serve"), help="this phase only")
    parser.add_argument("--role", choices=ROLES, help="this role only")
    parser.add_argument("--kind", choices=CLASSES, help="this kind of call only")
    parser.add_argument("--tries", type=int, help="of each kind of call, in either phase")
    options = parser.parse_args(argv)
    tries = QUICK if options.quick else FULL
    if options.tries:
        tries = (options.tries, options.tries)
    roles, kinds = [options.role] if options.role else ROLES, [options.kind] if options.kind else CLASSES
    cells = [Cell(role, kind) for role in roles for kind in kinds]
    rows = []
    with tempfile.TemporaryDirectory(prefix="nth-") as folder:
        campaign = Campaign(build(Path(folder)), cells, tries)
        for phase in (campaign.serve, campaign.start):
            if options.phase in (None, phase.__name__):
                for row in phase():
                    rows.append(row)
                    print("\n".join([row.line(), *row.notes]), flush=True)
    return _sum(rows)


def _sum(rows: Sequence[Row]) -> int:
    """Print the last line. The exit status."""
    ends = sum((row.outcomes for row in rows), Counter[str]())
    failures = sum(row.failures for row in rows)
    told = ", ".join(f"{count} {name}" for name, count in ends.most_common())
    print(f"{failures} failures in {ends.total()} failed calls of {len(rows)} kinds: {told}")
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
