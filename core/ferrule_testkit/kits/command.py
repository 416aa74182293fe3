"""The kit of commands: each call runs in a process of its own, as it does for a user; the same call runs once."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ferrule_testkit.kits.base import Kit, promise, shown

_PATIENCE = 60.0  # seconds for one call
_ODD_FLAG = "--no-such-flag-of-anyone"

# The command line's own way to run a command, but for finding it.
_SCRIPT = """
import importlib, importlib.util, json, sys
path, module, file, name, argv, report = json.loads(sys.argv[1])
sys.path[:] = path
sys.argv[1:] = argv
if file:
    spec = importlib.util.spec_from_file_location(module, file)
    found = importlib.util.module_from_spec(spec)
    sys.modules[module] = found
    spec.loader.exec_module(found)
else:
    found = importlib.import_module(module)
for part in name.split("."):
    found = getattr(found, part)
from ferrule.errors import ConfigError, FerruleError
from ferrule.plugin import discover
try:
    status = found().run(argv, discover())
    kind = type(status).__name__
except FerruleError as error:
    status, kind = 2 if isinstance(error, ConfigError) else 1, "int"
    print("ferrule: error:", *str(error).splitlines(), sep="\\n  ", file=sys.stderr)
sys.stdout.flush()
with open(report, "w") as out:
    json.dump([status, kind, sorted(name for name in sys.modules if "." not in name)], out)
"""


@dataclass(frozen=True)
class Ran:
    """`modules` are the top-level modules that were imported; `kind` is the type of what `run` returned."""

    status: int
    kind: str
    modules: frozenset[str]
    out: str
    err: str


class CommandKit(Kit):
    """A command tells about itself at once, and refuses what it does not know in one block.

    Settings: `heavy`, top-level modules that --help may not import.
    """

    kind = "command"
    heavy: Sequence[str] = ("torch", "transformers", "numpy", "uvicorn", "starlette")

    # ------------------------------------------------------------------------------------ promises

    def test_it_says_what_it_does(self) -> None:
        """`summary` is one line of plain text, for `ferrule --help`."""
        summary = self.plugin.summary
        line = isinstance(summary, str) and bool(summary.strip()) and len(summary.splitlines()) == 1
        promise(line and len(summary) <= 100, f"the summary is {shown(summary)}")

    def test_help_is_an_answer(self) -> None:
        """--help and -h print to standard output, nothing to standard error, and end with 0."""
        for flag in ("-h", "--help"):
            ran = self.ran(flag)
            fine = ran.status == 0 and bool(ran.out.strip()) and not ran.err
            promise(fine, f"{flag} ends with {ran.status}: {shown(ran.out)} {shown(ran.err)}")

    def test_help_is_quick(self) -> None:
        """--help imports nothing heavy."""
        heavy = sorted(self.ran("--help").modules & set(self.heavy))
        promise(not heavy, f"--help imports {', '.join(heavy)}")

    def test_an_unknown_flag_is_one_block(self) -> None:
        """A flag that it does not know ends with 2 and one block that names it, without a traceback or output."""
        ran = self.ran(_ODD_FLAG)
        promise(ran.status == 2, f"an unknown flag ends with {ran.status}: {shown(ran.err or ran.out)}")
        promise(_ODD_FLAG in ran.err, f"the unknown flag is not named: {shown(ran.err)}")
        promise("Traceback" not in ran.err and not ran.out, f"more than one block: {shown(ran.out)} {shown(ran.err)}")

    def test_the_exit_status_is_a_number(self) -> None:
        """`run` returns a whole number."""
        ran = self.ran("--help")
        promise(ran.kind == "int", f"run returns {ran.kind}")

    # ------------------------------------------------------------------------------------ parts

    def ran(self, *argv: str) -> Ran:
        module, file = self.plugin.__module__, ""
        if module.startswith("_ferrule_file_") or not _findable(module):
            file = inspect.getfile(self.plugin)
        return _ran(self.plugin, module, file, tuple(sys.path), argv)


@lru_cache(maxsize=2)  # of one plugin: most promises are about --help
def _ran(plugin: type, module: str, file: str, path: tuple[str, ...], argv: tuple[str, ...]) -> Ran:
    with tempfile.TemporaryDirectory(prefix="ferrule-kit-") as folder:
        report = Path(folder) / "report.json"
        task = json.dumps([path, module, file, plugin.__qualname__, argv, str(report)])
        try:
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT, task],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            promise(False, f"{' '.join(argv)} does not end within {_PATIENCE:.0f} s")
            raise
        if not report.exists():  # it ended the process, or its exception is not a FerruleError
            return Ran(done.returncode, "exit", frozenset(), done.stdout, done.stderr)
        status, kind, modules = json.loads(report.read_text())
    return Ran(status, kind, frozenset(modules), done.stdout, done.stderr)


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
