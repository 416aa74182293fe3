"""Pages whose console output is real: each command of a page is run, and its output is what the page shows.

``python -m tools.pages`` renews them; a test compares. A block ``console`` has
commands, behind ``$``, and what they print; a block with ``title="FILE"`` is a file, written when its turn comes. The
server's log is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.wheels import Distribution, install

SITE = "/venv/lib/python3/site-packages"  # what pages call the folder of installed packages
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_LOG = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:[^\n]*\n?")
_NOT_RUN = "# "  # behind a command's spaces: a comment of the page; a command that is nothing else is shown only
_WRAPPERS = {
    "ferrule": """case "$1" in
  serve) shift; set -- serve --host 127.0.0.1 --port 0 "$@" ;;
esac
exec "{python}" -m ferrule "$@\"""",
    "python": 'exec "{python}" "$@"',
    "pytest": 'exec "{python}" -m pytest -p no:cacheprovider "$@"',
    # Offline, and into the page's own folder of packages instead of this interpreter's.
    "pip": """case "$1" in
  install) exec "{python}" -m pip install {quiet} --upgrade --target "{site}" . ;;
  wheel) shift; exec "{python}" -m pip wheel {quiet} "$@" ;;
esac
exit 2""",
}
_QUIET = "-q --no-deps --no-index --no-build-isolation --disable-pip-version-check"


class World:
    """A shell in a folder of its own, with a folder of packages and the commands that a reader has."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site-packages"
        self.home = self.cwd = folder / "home"
        self.path = [self.site]
        self._bin = folder / "bin"
        for made in (self.site, self.home, self._bin):
            made.mkdir(parents=True)
        for name, script in _WRAPPERS.items():
            file = self._bin / name
            text = script.format(python=sys.executable, site=self.site, quiet=_QUIET)
            file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            file.chmod(0o755)

    def run(self, command: str) -> str:
        """Return what a command prints, on both streams, without anything that another run would print otherwise."""
        if command.startswith("cd "):
            self.cwd = (self.cwd / command.removeprefix("cd ")).resolve()
            return ""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.cwd,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        text = self._plain(done.stdout)
        if command.startswith("ferrule serve"):  # what other processes log comes whenever it likes, in between
            text = "\n".join(line for line in _LOG.sub("\n", text).splitlines() if line) + "\n"
        return text

    def write(self, path: str, text: str) -> None:
        (self.cwd / path).parent.mkdir(parents=True, exist_ok=True)
        (self.cwd / path).write_text(text, encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("FERRULE_", "VLLM_", "PYTEST_"))
        }
        return {
            **kept,
            "PATH": f"{self._bin}{os.pathsep}{kept.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([*map(str, self.path), *filter(None, [kept.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "FERRULE_LOGGING_LEVEL": "error",
        }

    def _plain(self, text: str) -> str:
        for number, folder in enumerate(self.path):
            text = text.replace(str(folder), SITE if not number else f"/home/me/.local{SITE.removeprefix('/venv')}")
        text = text.replace(str(self.home), "/home/me")
        text = re.sub(r"(\btakes|\bin|;) \d+\.\d+ ?s\b", r"\1 0.10 s", text)
        text = re.sub(r"\bcall_[0-9a-f]{24}\b", "call_7d1a0f4c29b8e6530a9f21cd", text)
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def renewed(page: str, world: World) -> str:
    """Return the page, with what its commands print now."""

    def block(found: re.Match[str]) -> str:
        language, title, body = found.groups()
        if title:
            world.write(title, body)
        if language != "console":
            return found[0]
        commands = [line for line in body.splitlines() if line.startswith("$ ")]
        shown = "".join(f"{line}\n{world.run(_command(line))}" for line in commands)
        return f"```console\n{shown}```"

    return _BLOCK.sub(block, page)


def _command(line: str) -> str:
    return line.removeprefix("$ ").partition(f"  {_NOT_RUN}")[0].strip()


# ---------------------------------------------------------------------------------------------- worlds

_POLICY = """
from ferrule.interfaces.scheduler import SchedulingPolicy


class Policy(SchedulingPolicy):
    def key(self, view, now):
        return (view.num_prompt,)

    def victim(self, running):
        return running[-1].id
"""
_HOOKS = "from ferrule.interfaces.hooks import Hooks\n\n\nclass Policy(Hooks):\n    pass\n"


def _policy(
    name: str, entry: str, source: str = _POLICY, version: str = "1.0", group: str = "v1.policy"
) -> Distribution:
    module = name.replace("-", "_")
    return Distribution(
        name=name,
        version=version,
        entry_points={f"ferrule.{group}": {entry: f"{module}:Policy"}},
        files={f"{module}.py": source},
    )


def _broken(world: World) -> None:
    """Install one distribution for each way to be broken."""
    local = world.site.parent / "local"
    world.path.append(local)
    install(_policy("good-policies", "short", version="2.1"), world.site)
    install(_policy("acme-fast", "fast", "import acme_core\n" + _POLICY), world.site)
    install(_policy("acme-gpu", "gpu", "import acme_cuda\n" + _POLICY), world.site)
    points = world.site / "acme_gpu-1.0.dist-info" / "entry_points.txt"
    points.write_text("[ferrule.v1.policy]\ngpu = acme_gpu:Policy [cuda]\n", encoding="utf-8")
    install(_policy("chatty", "chatty", "print('hello')\nraise SystemExit(3)\n"), world.site)
    install(_policy("unfinished", "half", _POLICY.replace("victim", "loser")), world.site)
    install(_policy("left-over", "gone"), world.site)
    (world.site / "left_over.py").unlink()
    install(_policy("next-year", "later", group="v2.policy"), world.site)
    install(_policy("one-rival", "rival"), world.site)
    install(_policy("other-rival", "rival"), world.site)
    install(_policy("odd-name", "a b"), world.site)
    install(_policy("listener", "listener", _HOOKS, group="v1.hooks"), world.site)
    install(_policy("twice", "new", version="2.0"), world.site)
    install(_policy("twice", "old", version="1.0"), local)


def _found(world: World) -> None:
    install(_policy("ferrule-shortest", "shortest", version="0.1.0"), world.site)
    install(_policy("listener", "listener", _HOOKS, group="v1.hooks"), world.site)


WORLDS: Mapping[str, Callable[[World], None]] = {
    "first-plugin.md": lambda world: None,
    "how-plugins-are-found.md": _found,
    "broken-plugins.md": _broken,
}


def renew(page: Path) -> str:
    """Return the page as it should be. Raises KeyError for a page that is none of WORLDS."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder).resolve())
        WORLDS[page.name](world)
        return renewed(page.read_text(encoding="utf-8"), world)
