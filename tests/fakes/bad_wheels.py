"""Distributions that are broken in every way that is seen in the wild, for tests of what a server makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from tools.wheels import Distribution, install

POLICY = """
from ferrule.interfaces.scheduler import SchedulingPolicy

class Newest(SchedulingPolicy):
    def key(self, view, now):
        return (-view.arrival,)

    def victim(self, running):
        return running[-1].id
"""

HANGS = "import time\ntime.sleep(600)\n"
PRINTS = "import sys\nprint('noise', flush=True)\nsys.stderr.write('more noise')\n"


class Bad(Struct, frozen=True):
    """A broken distribution of a policy. `listed` is part of what `plugins list` says; `told` of what `why` does.

    `usable` ones are odd and can be used nevertheless. `listed` is "" where only an import would tell. One that is
    `fatal` keeps torch itself from being imported: torch reads every distribution's entry points and fails over it.
    """

    name: str
    install: Callable[[Path], None]
    listed: str = ""
    told: str = ""
    usable: bool = False
    fatal: bool = False


def policy(name: str, source: str = POLICY, *, entry: str | None = None, version: str = "1.0") -> Distribution:
    """Return a distribution with one policy, which has the distribution's name without its ``-dist``."""
    module = name.replace("-", "_") + "_module"
    return Distribution(
        name=name,
        version=version,
        entry_points={"ferrule.v1.policy": {entry or name.removesuffix("-dist"): f"{module}:Newest"}},
        files={f"{module}.py": source},
    )


def bad_distributions() -> Iterator[Bad]:
    """Yield all bad distributions."""
    yield Bad("halfgone", _halfgone, told="No module named 'halfgone_dist_module'")
    yield Bad("bones", _bones, listed="bones-dist unknown", usable=True)
    yield Bad("nometa", _nometa, listed="nometa-dist unknown", usable=True)
    yield Bad("binary", _binary, listed="metadata of a distribution in", fatal=True)
    yield Bad("stale", _stale, listed="stale-dist is installed twice")  # which one counts is the file system's order
    yield Bad("prints", lambda folder: install(policy("prints-dist", PRINTS + POLICY), folder), usable=True)
    yield Bad("hangs", lambda folder: install(policy("hangs-dist", HANGS + POLICY), folder), told="did not end within")
    yield Bad("exits", lambda folder: install(policy("exits-dist", "raise SystemExit(3)"), folder), told="sys.exit(3)")
    yield Bad("extra", _extra, told="pip install 'extra-dist[gpu]'")
    for number, name in enumerate(("a b", "x:y", "\x1b[31mred", "a,b", "*", "../x", "-flag", "n" * 500)):
        yield Bad(
            name, _odd(number, name), listed=f"odd{number}-dist 1.0: {name[:60]!r} cannot be a policy plugin's name"
        )


def install_bad(folder: Path, *, fatal: bool = True) -> list[Bad]:
    """Install all of them side by side; without `fatal`, all that a server can bear."""
    found = [bad for bad in bad_distributions() if fatal or not bad.fatal]
    for bad in found:
        bad.install(folder)
    return found


def _info(folder: Path, name: str) -> Path:
    return folder / f"{name}_dist-1.0.dist-info"


def _halfgone(folder: Path) -> None:
    install(policy("halfgone-dist"), folder)
    (folder / "halfgone_dist_module.py").unlink()


def _bones(folder: Path) -> None:
    install(policy("bones-dist"), folder)
    for file in _info(folder, "bones").iterdir():
        if file.name != "entry_points.txt":
            file.unlink()


def _nometa(folder: Path) -> None:
    install(policy("nometa-dist"), folder)
    (_info(folder, "nometa") / "METADATA").write_bytes(b"\xff\xfe\x00\x1b[31m")


def _binary(folder: Path) -> None:
    install(policy("binary-dist"), folder)
    (_info(folder, "binary") / "entry_points.txt").write_bytes(b"[ferrule.v1.policy]\n\xff\xfe = x:y\n")


def _stale(folder: Path) -> None:
    """Leave a remainder of an old install beside the new one."""
    install(policy("stale-dist", version="2.0"), folder)
    leftover = folder / "stale_dist.egg-info"
    leftover.mkdir()
    (leftover / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: stale-dist\nVersion: 0.1\n")
    (leftover / "entry_points.txt").write_text("[ferrule.v1.policy]\nstale_old = not_there:Newest\n")


def _extra(folder: Path) -> None:
    install(policy("extra-dist", "import a_package_of_the_extra\n" + POLICY), folder)
    (_info(folder, "extra") / "entry_points.txt").write_text(
        "[ferrule.v1.policy]\nextra = extra_dist_module:Newest [gpu]\n"
    )


def _odd(number: int, name: str) -> Callable[[Path], None]:
    return lambda folder: install(policy(f"odd{number}-dist", entry=name), folder)
