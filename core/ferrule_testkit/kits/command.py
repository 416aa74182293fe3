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

from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

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
except SystemExit as end:  # argparse's way, and that of sys.exit()
    status, kind = 0 if end.code is None else end.code, "int"
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
sys.stdout.flush()
with open(report, "w") as out:
    json.dump([status, kind, sorted(name for name in sys.modules if "." not in name)], out)
"""


@dataclass(frozen=True)
class Ran:
    """The result of a run. `modules` are the top-level modules that were imported; `kind` is the type of what `run`
    returned.

    Without a report, which an exception and a process that ends itself leave none of, `modules` is None.
    """

    status: int
    kind: str
    modules: frozenset[str] | None
    out: str
    err: str


class CommandKit(Kit):
    """A command tells about itself at once, and refuses what it does not know in one block.

    It may end by returning its exit status or by SystemExit, as argparse does. Settings: `heavy`, top-level modules
    that --help may not import; `arguments`, what a call needs before it tells of an unknown flag, such as the name of
    a sub-command.
    """

    kind = "command"
    arguments: Sequence[str] = ()
    heavy: Sequence[str] = ("torch", "transformers", "numpy", "uvicorn", "starlette")

    # ------------------------------------------------------------------------------------ promises

    def test_it_says_what_it_does(self) -> None:
        """Have a `summary` of one line of plain text, for `ferrule --help`."""
        summary = self.plugin.summary
        line = isinstance(summary, str) and bool(summary.strip()) and len(summary.splitlines()) == 1
        promise(line and len(summary) <= 100, f"the summary is {shown(summary)}")

    def test_help_is_an_answer(self) -> None:
        """Print --help and -h to standard output, nothing to standard error, and exit with 0."""
        for flag in ("-h", "--help"):
            ran = self.ran(flag)
            fine = ran.status == 0 and bool(ran.out.strip()) and not ran.err
            promise(fine, f"{flag} ends with {ran.status}: {shown(ran.out)} {shown(ran.err)}")

    def test_help_is_quick(self) -> None:
        """Import nothing heavy for --help."""
        ran = self.ran("--help")
        if ran.modules is None:
            promise(False, f"--help ends the process with {ran.status}, so what it imports is not known")
            return
        heavy = sorted(ran.modules & set(self.heavy))
        promise(not heavy, f"--help imports {', '.join(heavy)}")

    def test_an_unknown_flag_is_one_block(self) -> None:
        """Exit with 2 for an unknown flag, with one block of text on standard error, no traceback, and nothing on
        standard output.
        """
        ran = self.ran(*self.arguments, _ODD_FLAG)
        promise(ran.status == 2, f"an unknown flag ends with {ran.status}: {shown(ran.err or ran.out)}")
        promise(bool(ran.err.strip()), "nothing is said of an unknown flag")
        promise("Traceback" not in ran.err and not ran.out, f"more than one block: {shown(ran.out)} {shown(ran.err)}")

    def test_an_unknown_flag_is_named(self) -> None:
        """Name the unknown flag in that block. Without `arguments` the block may be about arguments that are
        required.
        """
        ran = self.ran(*self.arguments, _ODD_FLAG)
        if _ODD_FLAG not in ran.err and not self.arguments and "required" in ran.err:
            does_not_apply(f"a call needs arguments, give `arguments`: {shown(ran.err.splitlines()[-1])}")
        promise(_ODD_FLAG in ran.err, f"the unknown flag is not named: {shown(ran.err)}")

    def test_the_exit_status_is_a_number(self) -> None:
        """Return a whole number from `run`, or raise SystemExit."""
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
            return Ran(done.returncode, "nothing", None, done.stdout, done.stderr)
        status, kind, modules = json.loads(report.read_text())
    return Ran(status, kind, frozenset(modules), done.stdout, done.stderr)


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
