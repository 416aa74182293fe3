"""`ferrule collect-env`: what a bug report needs, read without importing anything heavy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ferrule import __version__, env
from ferrule.config.help import CommandUsage
from ferrule.config.parse import parse_command
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins
from ferrule.plugin import KINDS

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "msgspec",
    "pyzmq",
    "starlette",
    "uvicorn",
    "uvloop",
    "jinja2",
    "pluggy",
    "ray",
)
_CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "i8mm",
)
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


class CollectEnv(Command):
    summary = "Print what a bug report needs to say about this machine."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        if parse_command(argv, CommandUsage("ferrule collect-env", self.summary), plugins, sections={}) is None:
            return 0
        sections = {
            "System": _system(),
            "Devices": _devices(),
            "Packages": _packages(),
            "Plugins": _plugins(plugins),
            "Environment": iter(env.report().items()),
        }
        for title, rows in sections.items():
            print(title)
            for name, value in rows:
                print(f"  {name}: {value}")
        return 0


def _system() -> Iterator[tuple[str, str]]:
    yield "ferrule", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"
    yield "os", f"{_os_name()}, kernel {platform.release()}, {platform.machine()}"
    yield "libc", " ".join(platform.libc_ver()) or "unknown"


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _devices() -> Iterator[tuple[str, str]]:
    cpu = _proc("/proc/cpuinfo")
    model = cpu.get("model name") or platform.processor() or "unknown"
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    yield "cpu", f"{model}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"
    yield "cpu features", " ".join(name for name in _CPU_FEATURES if name in flags) or "none that affects Ferrule"
    memory = _proc("/proc/meminfo")
    yield "memory", f"{memory.get('MemTotal', 'unknown')}, {memory.get('MemAvailable', 'unknown')} available"
    for gpu in sorted(_GPU_FOLDER.glob("*/information")):
        yield "gpu", _proc(str(gpu)).get("Model", "unknown")


def _proc(path: str) -> dict[str, str]:
    """Return the `name : value` lines of a file in /proc; the first line of a name counts. Empty without such a
    file.
    """
    rows: dict[str, str] = {}
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return rows
    for line in text.splitlines():
        name, _, value = line.partition(":")
        rows.setdefault(name.strip(), value.strip())
    return rows


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _plugins(plugins: Plugins) -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        names = plugins.names(kind)
        if names:
            yield kind, ", ".join(f"{name} ({plugins.origin(kind, name)})" for name in names)
