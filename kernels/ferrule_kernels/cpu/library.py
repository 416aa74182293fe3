"""The compiled kernels: the ones that were installed with the package, else built once into the user's cache.

The sources are plain C++ with a C interface: no header of torch or Python, so they compile in a minute or two of one
core, and one build serves every version of both. Threads are those of torch: its OpenMP library is in the process
already, and the kernels are linked against none of their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
# A name is written here and nowhere else: `ferrule_kernels.building` reads these lists when a wheel is built.
SOURCES = (
    "attention.cpp",
    "blocks.cpp",
    "codes.cpp",
    "delta.cpp",
    "dense.cpp",
    "elementwise.cpp",
    "low_rank.cpp",
    "machine.cpp",
    "matmul.cpp",
    "matmul_pack.cpp",
    "pages.cpp",
    "recording.cpp",
    "routing.cpp",
    "sampling.cpp",
    "selective.cpp",
    "short_conv.cpp",
    "tables.cpp",
)
HEADERS = (
    "activations.h",
    "blocks.h",
    "cells.h",
    "float8.h",
    "matmul.h",
    "panels.h",
    "recording.h",
    "rows.h",
    "shares.h",
    "states.h",
    "tiles.h",
    "vectors.h",
)

# A compiler that tunes for AMD's processors decides for each loop whether products and sums are rounded together: a row
# would have other bits alone than in a batch.
_NOT_TUNED = ("-O3", "-mtune=generic")
_FLOATS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
FLAGS = (*_NOT_TUNED, *_FLOATS, "-std=gnu++17", "-fPIC", "-fopenmp")

_V4 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_TILES = {"amx_tile", "amx_bf16", "amx_int8"}
_NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
_BF16 = ("-mavx512vnni", "-mavx512bf16")
_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
# What is built into a wheel for x86-64, best first: file name, what the processor must have, options of the compiler.
VARIANTS = (
    ("_v4_amx", {*_V4, "avx512_vnni", "avx512_bf16", *_TILES}, ("-march=x86-64-v4", *_BF16, *_AMX)),
    ("_v4_bf16", {*_V4, "avx512_vnni", "avx512_bf16"}, ("-march=x86-64-v4", *_BF16)),
    ("_v4_vnni", {*_V4, "avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
    ("_v4", _V4, ("-march=x86-64-v4",)),
    ("_v3", {"avx2", "fma", "f16c", "bmi2"}, ("-march=x86-64-v3",)),
)
_BUILD_SECONDS = 300  # for one file
_AT_ONCE = 4  # files; the largest takes as long as all others in three
_SCRATCH = "build-"
_STALE_SECONDS = 60  # a source that is newer than a library by this much was changed after it was built


class KernelsUnavailableError(Exception):
    """An error where this machine has no compiled kernels; the text says why."""


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library. Raises KernelsUnavailableError.

    Tile registers (AMX) must be given by the system, and must multiply a small product right; else they are not used.
    """
    here = features()
    if here >= _TILES:
        loaded = _open(here)
        if loaded.ferrule_use_tiles() == 0 and loaded.ferrule_check_tiles() == 0:
            return loaded
        logging.getLogger("ferrule.kernels").warning(
            "the processor has tile registers (AMX), but they cannot be used or are wrong: vectors multiply instead"
        )
    return _open(here - _TILES)


@functools.cache
def available() -> bool:
    """Return whether the library can be loaded. A failure is final: another try may run a compiler for a minute."""
    try:
        load()
    except KernelsUnavailableError:
        return False
    return True


def used() -> str:
    """Return which kernels this process computes with, for the log: a variant's name, or why there are none.

    A library that was compiled for this machine at its first use is named with its path.
    """
    try:
        path = Path(load()._name)
    except KernelsUnavailableError as error:
        return f"those of torch ({error})"
    name = path.name.partition(".")[0]
    return name.removeprefix("_") if path.parent == HERE else f"compiled at first use ({path})"


def _open(here: frozenset[str]) -> ctypes.CDLL:
    path = _installed(here) or _build(here)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"{path.name} cannot be loaded: {error}") from error


def features() -> frozenset[str]:
    """Return the processor's features under Linux's names; empty where the system does not report them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next(
        (frozenset(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")), frozenset()
    )


def _installed(here: frozenset[str]) -> Path | None:
    """Return the best variant beside this file that a processor with these features can run."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    newest = max((HERE / name).stat().st_mtime for name in (*SOURCES, *HEADERS))
    for name, needed, _ in VARIANTS:
        found = sorted(HERE.glob(f"{name}.*so"))
        if found and needed <= here and newest < found[0].stat().st_mtime + _STALE_SECONDS:
            return found[0]
    return None


def _build(here: frozenset[str]) -> Path:
    """Compile for this machine, once for each source, compiler and processor. Raises KernelsUnavailableError."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelsUnavailableError("there is no C++ compiler to build the kernels with")
    try:
        folder = _cache_folder()
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=10).stdout
        texts = b"".join((HERE / name).read_bytes() for name in (*SOURCES, *HEADERS))
        flags = (*FLAGS, "-march=native", *(_NO_TILES if here < features() else ()))
        seed = (version, texts, " ".join(flags).encode(), " ".join(sorted(here)).encode())
        target = folder / f"{hashlib.sha256(b'/'.join(seed)).hexdigest()[:24]}.so"
        if not target.is_file():
            _compile(compiler, flags, target)
        return target
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise KernelsUnavailableError(f"the kernels do not compile: {said[0] if said else error}") from error
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise KernelsUnavailableError(f"the kernels cannot be built: {error}") from error


def _cache_folder() -> Path:
    """Return a folder that nobody else may write to. Raises OSError; RuntimeError without a home directory."""
    folder = Path.home() / ".cache" / "ferrule" / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise OSError(f"{folder} may be written to by others")
    return folder


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Build beside the target and rename, so that an interrupted build leaves no partial file.

    One process builds at a time; the others wait and find what it has built.
    """
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a process that dies gives it up
        for left in target.parent.glob(f"{_SCRATCH}*"):  # by a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        if target.is_file():
            return
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
            large_first = sorted((HERE / name for name in SOURCES), key=lambda source: -source.stat().st_size)
            with ThreadPoolExecutor(_AT_ONCE) as files:
                objects = list(files.map(lambda source: _object(compiler, flags, source, Path(scratch)), large_first))
            linked = Path(scratch) / target.name
            command = [compiler, "-shared", *objects, "-o", str(linked)]  # not -fopenmp: see above
            subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS)
            linked.replace(target)


def _object(compiler: str, flags: Sequence[str], source: Path, folder: Path) -> str:
    """Compile one file, and return the path of what came of it."""
    made = str(folder / f"{source.name}.o")
    command = [compiler, *flags, "-c", str(source), "-o", made]
    subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS)
    return made
