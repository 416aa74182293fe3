"""`ferrule plugins check`: a plugin's conformance kit in a process of its own, under deadlines; and the kits'
promises.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ferrule.config.help import terminal_width
from ferrule.config.option import opt
from ferrule.errors import ConfigError
from ferrule.plugin import PluginRef

_TAIL = 2000  # bytes of the plugin's own output that a report keeps
_LINES = 8  # lines of it that are printed
_MODULE = "ferrule_testkit.kits.check"
_LISTING = "ferrule_testkit.kits.listing"


_MARKS = {"ok": "ok  ", "failed": "FAIL", "skipped": "-   "}


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `ferrule plugins check`."""

    name: str = opt("", "kind:name, a name, or a distribution.")
    all: bool = opt(False, "Check every plugin that can be used, the built-in ones included.")
    list: bool = opt(False, "Check nothing: list what is proved of this kind or plugin, or without a name of all.")
    deadline: float = opt(120.0, "Seconds that the check of one plugin may take.")
    import_deadline: float = opt(10.0, "Seconds that its import may take.")
    json: bool = opt(False, "Print JSON.")


@dataclass(frozen=True)
class Subject:
    """A plugin to check; `refused` says why it cannot be used."""

    ref: PluginRef
    refused: str = ""


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """One promise of a kit: `result` is one of ok, failed, skipped; `where` is file and line of the failure."""

    name: str
    promise: str = ""
    result: str
    reason: str = ""
    where: str = ""
    seconds: float = 0.0


class Checked(msgspec.Struct, kw_only=True):
    """The result of a check. `error` is set where it was cut short: by a broken import, a crash, a deadline."""

    error: str | None = None
    promises: list[Promise] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    output: str = ""  # the end of what the plugin wrote

    @property
    def ok(self) -> bool:
        return self.error is None and all(promise.result != "failed" for promise in self.promises)


class _Line(msgspec.Struct):
    """A line of the child's report, of any kind."""

    type: str
    promises: list[str] = []
    error: str | None = None
    outcome: Promise | None = None


def run_checks(subjects: Sequence[Subject], options: CheckOptions) -> int:
    """Check plugins one after the other and print the result of each. Returns 1 when one failed."""
    if min(options.deadline, options.import_deadline) <= 0:
        raise ConfigError("A deadline must be more than 0 seconds.")
    rows, failed = [], False
    for subject in subjects:
        ref = subject.ref
        if not options.json:
            print(f"{ref.id} of {ref.source}", flush=True)
        found = Checked(error=subject.refused)
        if not subject.refused:
            found = check(ref, options.deadline, options.import_deadline)
            if found.error is None and not any(promise.result != "skipped" for promise in found.promises):
                found.error = "nothing could be proved"
        failed = failed or not found.ok
        rows.append({"kind": ref.kind, "name": ref.name, "source": ref.source, "ok": found.ok, **_fields(found)})
        if not options.json:
            _print(found)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode({"ok": not failed, "plugins": rows}), indent=2).decode())
    return 1 if failed else 0


def _fields(found: Checked) -> dict[str, object]:
    return {name: getattr(found, name) for name in Checked.__struct_fields__}


def _print(found: Checked) -> None:
    counts = dict.fromkeys(_MARKS, 0)
    for promise in found.promises:
        counts[promise.result] += 1
        told = f": {promise.reason}" if promise.reason else ""
        place = f" ({promise.where})" if promise.where and promise.result == "failed" else ""
        print(f"  {_MARKS[promise.result]}  {spoken(promise.name)}{told}{place}")
    if found.error is not None:
        print(f"  FAIL  {found.error}")
    if not found.ok and found.output:
        print("  it wrote:", *found.output.splitlines()[-_LINES:], sep="\n    ")
    if found.promises:
        print(
            f"  {counts['ok']} kept, {counts['failed']} broken, {counts['skipped']} do not apply; {found.seconds:.1f} s"
        )


class _Sentence(msgspec.Struct):
    name: str
    promise: str


class _Listed(msgspec.Struct, kw_only=True):
    """A kind of plugin: the promises of its kit, and the names of its settings."""

    kind: str
    kit: str
    about: list[str]
    promises: list[_Sentence]
    settings: list[str]


def list_promises(kinds: Sequence[str], options: CheckOptions) -> int:
    """Print the promises of the kits of these kinds. Kits are imported in a process of their own: some need torch."""
    child = subprocess.run([sys.executable, "-m", _LISTING, *kinds], stdout=subprocess.PIPE, check=True)
    if options.json:
        print(msgspec.json.format(child.stdout, indent=2).decode())
        return 0
    width = terminal_width()
    for found in msgspec.json.decode(child.stdout, type=list[_Listed]):
        print(f"{found.kind}: {found.kit}")
        for paragraph in (*found.about, f"All settings: {', '.join(found.settings)}."):
            print(textwrap.fill(paragraph, width, initial_indent="  ", subsequent_indent="  "))
        for each in found.promises:
            print(f"  - {spoken(each.name)}")
            print(textwrap.fill(each.promise, width, initial_indent="      ", subsequent_indent="      "))
    return 0


def check(ref: PluginRef, deadline: float, import_deadline: float) -> Checked:
    """Import one plugin and run its kit. Deadlines are in seconds; a crash and a hang are results like any other."""
    start = time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            start_new_session=True,  # so that what the plugin starts can be ended with it
        )
        os.close(writing)
        try:
            _send(child, {"ref": ref, "path": sys.path, "report": writing})
            found = _follow(child, reading, start, (deadline, import_deadline))
        finally:
            os.close(reading)
            _end(child)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
        found.output = output.read().decode("utf-8", "replace").strip()
    found.seconds = time.monotonic() - start
    return found


def _send(child: subprocess.Popen[bytes], task: dict[str, object]) -> None:
    if child.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended already, which its status will tell
            child.stdin.write(msgspec.json.encode(task))
            child.stdin.close()


def _follow(child: subprocess.Popen[bytes], reading: int, start: float, deadlines: tuple[float, float]) -> Checked:
    """Read reports until the child ends or a deadline has passed."""
    found, reports, importing = Checked(), _Reports(reading, start + deadlines[0]), False
    names: list[str] = []
    for line in reports:
        if line is None:
            late = deadlines[1] if importing else deadlines[0]
            what = "its import" if importing else _proving(names, found)
            found.error = f"{what} did not end within {late:g} s"
            return found
        match line.type:
            case "Ready":
                names, importing = line.promises, True
                reports.end = min(reports.end, time.monotonic() + deadlines[1])
            case "Loaded":
                importing, reports.end = False, start + deadlines[0]
                if line.error is not None:
                    found.error = line.error
            case "Proved" if line.outcome is not None:
                found.promises.append(line.outcome)
    status = child.wait()
    if status:
        what = "its import" if importing else _proving(names, found)
        found.error = f"{what} ended the process: {ending(status)}"
    return found


class _Reports:
    """The child's reports as they come; None, as the last one, when the time `end` has come."""

    def __init__(self, reading: int, end: float) -> None:
        self.end = end
        self._reading = reading

    def __iter__(self) -> Iterator[_Line | None]:
        partial = b""
        while True:
            left = self.end - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                yield None
                return
            data = os.read(self._reading, 1 << 16)
            if not data:
                return
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                yield msgspec.json.decode(line, type=_Line)


def _proving(names: list[str], found: Checked) -> str:
    """Return the promise that the child is working on, as words."""
    return spoken(names[len(found.promises)]) if len(found.promises) < len(names) else "the check"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def spoken(name: str) -> str:
    """Return a promise's name as words."""
    return name.removeprefix("test_").replace("_", " ")


def ending(status: int) -> str:
    """Return a phrase for the end of a process, from its return code."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
