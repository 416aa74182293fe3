"""Programs that end with an open engine: ``python -m tools.campaign.programs [--quick]``.

A program opens an engine, comes to a state, and ends in one of the ways in which programs do. It has closed nothing.
Its status must be that of a program without an engine; what it printed must be there; it may not say that a thread,
memory or an object came to a bad end; it must be over soon, and no process of it may be left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from ferrule_contrib import tiny
from ferrule_testkit import server as servers
from tools.campaign.deaths import gone
from tools.campaign.running import options, verdict

_SOON = 15.0  # seconds from the end of a program's last line to its exit; a busy machine takes most of one
_LEFT = 5.0  # seconds in which processes of its own follow it
_PATIENCE = 120.0  # seconds until it has come to its state
_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault", "Exception ignored", "leaked", "was never")

# How each kind of engine is opened, and how its requests come to run.
_OPEN = {
    "LLM": """
engine = ferrule.LLM(MODEL, max_num_seqs=8)
def work(tokens):
    with contextlib.suppress(ferrule.errors.EngineDead):  # it is closed while a thread waits for it
        engine.generate(["Once upon a time"] * 4, params(tokens), use_tqdm=False)
def run():
    threading.Thread(target=work, args=(2000,), daemon=True).start()
    time.sleep(0.3)
""",
    "LLMEngine": """
engine = ferrule.LLMEngine.from_engine_args(ferrule.EngineArgs(MODEL, max_num_seqs=8))
def add(tokens):
    for number in range(4):
        engine.add_request(f"{tokens}-{number}", "Once upon a time", params(tokens))
def work(tokens):
    add(tokens)
    while engine.has_unfinished_requests():
        engine.step()
def run():
    add(2000)
    for _ in range(8):
        engine.step()
""",
    "AsyncLLM": """
engine = ferrule.AsyncLLM.from_engine_args(ferrule.AsyncEngineArgs(MODEL, max_num_seqs=8))
async def work(tokens):
    async for _ in engine.generate("Once upon a time", params(tokens), f"{tokens}"):
        pass
async def run():
    running.append(asyncio.create_task(work(2000)))
    await asyncio.sleep(0.3)
running = []
""",
}
# In a coroutine what takes time is waited for.
_AWAITED = {"work(8)": "await work(8)", "run()": "await run()", "time.sleep(": "await asyncio.sleep("}
_AWAITED |= {"def main()": "async def main()", "    main()": "    asyncio.run(main())"}
_STATES = {"fresh": "", "idle": "work(8)", "running": "run()"}
# How a program ends, and its status then.
_ENDS = {
    "return": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise LookupError('as it should')", 1),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", -signal.SIGINT),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", -signal.SIGKILL),
    "_exit": ("sys.stdout.flush()\nos._exit(4)", 4),
    "a fork's end": ("child = os.fork()\nif child == 0:\n    sys.exit(5)\nsys.exit(os.waitpid(child, 0)[1] >> 8)", 5),
}
_ORDERLY = ("return", "exit", "exception", "SIGINT", "a fork's end")  # in which Python flushes what was printed
_PROGRAM = """
import asyncio, contextlib, os, signal, sys, threading, time
import ferrule, ferrule.errors

def params(tokens):
    return ferrule.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)

def main():
    global engine
{open}
{state}
    sys.stderr.write("here\\n")
    sys.stderr.flush()
    print("the last words")
{end}

MODEL = None
if __name__ == "__main__":
    main()
"""


class Case(NamedTuple):
    kind: str
    state: str
    end: str
    own_process: bool  # of the engine

    def __str__(self) -> str:
        return f"{self.kind}, {self.state}, {self.end}{', engine in a process' if self.own_process else ''}"

    def source(self) -> str:
        def inside(text: str) -> str:
            return "".join(f"    {line}\n" for line in text.strip().splitlines())

        source = _PROGRAM.replace("{state}\n", inside(_STATES[self.state]))
        source = source.replace("{end}\n", inside(_ENDS[self.end][0]))
        if self.kind == "AsyncLLM":
            for before, after in _AWAITED.items():
                source = source.replace(before, after)
        source = source.replace("MODEL = None", f"MODEL = {str(tiny.path())!r}")
        return source.replace("{open}\n", inside(_OPEN[self.kind]))


def cases(quick: bool) -> Iterator[Case]:
    """Yield all cases; or each kind, state and end at least once."""
    if not quick:
        yield from itertools.starmap(Case, itertools.product(_OPEN, _STATES, _ENDS, (False, True)))
        return
    kinds, states = list(_OPEN), list(_STATES)
    for number, end in enumerate(_ENDS):
        yield Case(kinds[number % 3], states[(number + number // 3) % 3], end, own_process=number % 2 == 1)


def run(case: Case) -> tuple[float, list[str]]:
    """Return the seconds from the last line of a program to its exit, and its problems."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FERRULE_ENABLE_V1_MULTIPROCESSING": str(int(case.own_process))}
    command = [sys.executable, "-c", case.source()]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, preexec_fn=_interruptible
        )

        def text(file: IO[bytes]) -> str:
            return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")

        try:
            if not servers.until(lambda: "\nhere\n" in f"\n{text(err)}" or process.poll() is not None, _PATIENCE):
                return _PATIENCE, [f"it has not come to its state: {text(err)[-300:]}"]
            below, began = servers.descendants(process.pid), time.monotonic()
            servers.until(lambda: process.poll() is not None, _SOON)
            seconds = time.monotonic() - began
            servers.until(lambda: all(map(gone, below)), _LEFT)
            left = sum(not gone(pid) for pid in below)
            return seconds, list(problems_of(case, process.returncode, text(out), text(err), left))
        finally:
            if process.poll() is None:
                for pid in (process.pid, *servers.descendants(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would its children


def problems_of(case: Case, status: int | None, out: str, err: str, left: int) -> Iterator[str]:
    expected = _ENDS[case.end][1]
    if status is None:
        yield f"it has not ended {_SOON:.0f} s later"
        return
    if status != expected:
        yield f"its status is {status}, not {expected}: {err[-600:]}"
    if "the last words\n" not in out and case.end in _ORDERLY:
        yield "what it printed is lost"
    said = err.partition("here\n")[2]
    if found := [word for word in _WORDS if word in said]:
        yield f"it said {found[0]!r}: {said[-600:]}"
    if "Traceback" in said and case.end not in {"exception", "SIGINT"}:
        yield f"there is a traceback: {said[-600:]}"
    if left:
        yield f"{left} of its processes are left"


def main(argv: Sequence[str]) -> int:
    chosen, problems, slowest = list(cases(options("programs", __doc__, argv))), [], 0.0
    for case in chosen:
        seconds, wrong = run(case)
        slowest = max(slowest, seconds)
        problems += [f"{case}: {each}" for each in wrong]
        print(f"{'FAILED' if wrong else 'ok    '} {seconds:5.2f} s  {case}", flush=True)
    figures = f"{len(chosen)} programs ended with an open engine, the slowest after {slowest:.1f} s (bound {_SOON:.0f})"
    return verdict(figures, problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
