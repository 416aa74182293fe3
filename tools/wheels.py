"""Throw-away distributions: wheels written by hand, and projects built and installed with pip as users would."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field


class Distribution(Struct, frozen=True, kw_only=True):
    """The contents of a wheel. `entry_points` maps a group to its lines; `files` maps paths to their text."""

    name: str
    version: str = "1.0"
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}"

    def contents(self) -> dict[str, str]:
        """Return every file of the wheel but RECORD, by path."""
        info = f"{self.stem}.dist-info"
        groups = [
            "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in lines.items()), ""])
            for group, lines in self.entry_points.items()
        ]
        return {
            **self.files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: ferrule\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": "\n".join(groups),
        }


def build_wheel(dist: Distribution, folder: Path) -> Path:
    """Write the wheel that pip would install, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{dist.stem}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in dist.contents().items():
            content = text.encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
            wheel.writestr(name, content)
        info = f"{dist.stem}.dist-info"
        wheel.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    return path


def install(dist: Distribution, site: Path) -> None:
    """Build the wheel and unpack it into a folder that is, or will be, on a Python path."""
    wheel = build_wheel(dist, site.parent / f"{site.name}-wheels")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def install_project(project: Path, site: Path) -> Path:
    """Build a pip project's wheel and install it, without its dependencies, into `site`; returns the wheel.

    The project is copied first, so that the build leaves nothing in it. Needs no network: the build uses this
    interpreter's setuptools. Raises RuntimeError with pip's output.
    """
    with tempfile.TemporaryDirectory() as work:
        copy = shutil.copytree(project, Path(work) / "project", ignore=shutil.ignore_patterns("build", "*.egg-info"))
        wheels = site.parent / f"{site.name}-wheels"
        _pip("wheel", "--no-build-isolation", "--wheel-dir", str(wheels), str(copy))
    (wheel,) = wheels.glob("*.whl")
    _pip("install", "--target", str(site), str(wheel))
    return wheel


def _pip(verb: str, *arguments: str) -> None:
    quiet = ["--no-deps", "--no-index", "--disable-pip-version-check", "--no-cache-dir"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", verb, *quiet, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"pip {verb} {arguments[-1]}:\n{done.stdout}{done.stderr}")
