"""CPU kernels as tests compile them: for other processors, with emulated registers, with a planted fault.

A compiled file is kept from one run of the tests to the next, in pytest's cache folder. Its name has a hash of all that
it is made from: the source, the headers beside it, the flags, the compiler and the processor. `make clean` removes it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path

from ferrule_kernels.cpu import library as installed
from tests.shared import made
from tools import ROOT

FOLDER = ROOT / ".pytest_cache" / "kernels"


def shared_library(
    *sources: Path, flags: Iterable[str] = (), only: Callable[[Path], Iterable[str]] = lambda _: ()
) -> Path:
    """Return a shared library of C++ files, compiled with the flags of an installation and `flags`.

    `only` returns further flags of one file. Raises CalledProcessError where the compiler fails.
    """
    with ThreadPoolExecutor(2) as threads:  # the other test process may wait for the same library
        objects = list(threads.map(lambda source: object_file(source, *flags, *only(source)), sources))
    return _kept(f"{sources[0].stem}.so", [item.name.encode() for item in objects], ("-fopenmp", "-shared", *objects))


def object_file(source: Path, *flags: str) -> Path:
    """Return the object file of a C++ file, compiled with the flags of an installation and `flags`."""
    command = (*installed.FLAGS, *flags, "-c", source)
    read = [source, *sorted(source.parent.glob("*.h"))]
    made_from = [*(file.read_bytes() for file in read), *map(str.encode, command[:-1]), _machine()]
    return _kept(f"{source.stem}.o", made_from, command)


def _kept(name: str, made_from: Iterable[bytes], command: Iterable[str | Path]) -> Path:
    """Return the file that g++ makes with `command`; an earlier run may have made it from the same."""
    digest = sha256()
    for part in made_from:
        digest.update(len(part).to_bytes(8, "big") + part)
    FOLDER.mkdir(parents=True, exist_ok=True)
    return made(
        FOLDER / f"{digest.hexdigest()[:32]}-{name}",
        lambda path: subprocess.run(["g++", *command, "-o", path], check=True),
    )


@cache
def _machine() -> bytes:
    """Return what the compiler says of itself and of this processor."""
    asked = ["g++", "-march=native", "-v", "-E", "-x", "c++", os.devnull]
    return subprocess.run(asked, check=True, capture_output=True).stderr
