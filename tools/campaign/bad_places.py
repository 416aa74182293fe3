"""Places that are unusable, messages that are large, plugins that do not return."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.campaign.case import Case

_SLEEPS = "import time\ntime.sleep(10**6)\n"
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(10**6,)).start()
raise RuntimeError("not today")
"""


def plugin(text: str, timeout: str = "300") -> Callable[[Path], Sequence[str]]:
    """Prepare a policy plugin from a file with this text, whose import may take `timeout` seconds."""

    def prepare(folder: Path) -> Sequence[str]:
        file = folder / "odd.py"
        file.write_text(text, encoding="utf-8")
        return ["--plugin", f"policy={file}", "--scheduling-policy", "odd", "--plugin-import-timeout", timeout]

    return prepare


def origins(count: int) -> Callable[[Path], Sequence[str]]:
    """Prepare a configuration file with this many allowed origins."""

    def prepare(folder: Path) -> Sequence[str]:
        file = folder / "serve.yaml"
        names = [f"https://client-{number}.example.com" for number in range(count)]
        file.write_text(f"allowed-origins: {json.dumps(names)}\n", encoding="utf-8")
        return ["--config", str(file)]

    return prepare


def entry_points(count: int) -> Callable[[Path], Sequence[str]]:
    """Prepare an installed distribution with this many plugins. Its folder is in ``site`` beside the log; see
    `SITE`.
    """

    def prepare(folder: Path) -> Sequence[str]:
        info = folder / "site" / "many-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: many\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"tool_{number:06} = many.module_{number:06}:Parser" for number in range(count)]
        (info / "entry_points.txt").write_text("[ferrule.v1.tool_parser]\n" + "\n".join(lines) + "\n", encoding="utf-8")
        (folder / "serve.yaml").write_text("", encoding="utf-8")
        return ["--config", str(folder / "serve.yaml")]

    return prepare


_SITE = (
    'for word; do case "$word" in */serve.yaml) PYTHONPATH="${word%/*}/site"; export PYTHONPATH;; esac; done; exec "$@"'
)
_READ_ONLY = 'exec unshare -m sh -c "mount -o remount,ro,bind / && exec \\"\\$@\\"" sh "$@"'
_FOREIGN = 'exec unshare --user --map-user=54321 --map-group=54321 "$@"'  # who owns nothing, and has no name
_NO_SHM = 'exec unshare -m sh -c "mount -t tmpfs -o ro,size=4k none /dev/shm && exec \\"\\$@\\"" sh "$@"'

PLACES = (
    Case("plain"),
    Case("one-process", prepare=lambda folder: ["--disable-frontend-multiprocessing"]),
    Case("origins-8000", prepare=origins(8_000)),
    Case("origins-200000", prepare=origins(200_000)),
    Case("entry-points-600", prepare=entry_points(600), shell=_SITE),
    Case("entry-points-50000", prepare=entry_points(50_000), shell=_SITE, seconds=120),
    Case("import-sleeps", r"The import of plugin policy:odd of file .* within 15 s", plugin(_SLEEPS, "15")),
    Case("refused-plugin-thread", "not today", plugin(THREAD)),
    Case("stderr-closed", shell='exec "$@" 2>&-'),
    Case("stderr-full", shell='exec "$@" 2>/dev/full'),
    Case("all-full", shell='exec "$@" >/dev/full 2>&1'),
    Case("all-closed", shell='exec "$@" >&- 2>&- <&-'),
    Case("stderr-closed-error", "x", lambda folder: [str(folder / "none")], shell='exec "$@" 2>&-', silent=True),
    Case("stderr-full-error", "x", lambda folder: [str(folder / "none")], shell='exec "$@" 2>/dev/full', silent=True),
    Case("nofile-16", "ulimit -n", limits={resource.RLIMIT_NOFILE: 16}),
    Case("nofile-64", "", limits={resource.RLIMIT_NOFILE: 64}),
    Case("no-home", shell='unset HOME; exec "$@"'),
    Case("home-nowhere", env={"HOME": "/proc/nowhere"}, shell=_FOREIGN),
    Case("foreign-uid", shell=f"unset HOME USER LOGNAME; {_FOREIGN}"),
    Case("no-shm", shell=_NO_SHM),
    Case("read-only-root", "FERRULE_RPC_BASE_PATH", env={"TMPDIR": "/nonexistent"}, shell=_READ_ONLY),
    Case("read-only-root-tmpdir", env={"TMPDIR": "/dev/shm"}, shell=_READ_ONLY),
    Case("locale-c", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Case("optimised", env={"PYTHONOPTIMIZE": "2"}),
)
