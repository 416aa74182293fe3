"""The library of ``nth_shim.c``: it is compiled, given to a server by LD_PRELOAD, and told which call must fail."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROLES = ("launcher", "engine", "api", "pool")
CLASSES = ("allocation", "open", "send", "start", "thread")
ERRORS: Mapping[str, tuple[int, ...]] = {  # in turns
    "allocation": (errno.ENOMEM,),
    "open": (errno.EMFILE, errno.EIO),
    "send": (errno.EPIPE, errno.ENOBUFS),
    "start": (errno.EAGAIN,),
    "thread": (errno.EAGAIN,),
}
_SOURCE = Path(__file__).with_suffix(".c")
_HEAD = struct.Struct("=7q")  # armed, role, class, nth, error, failed, pid
_HITS = struct.Struct(f"={(1 + len(ROLES)) * len(CLASSES)}q")
_WHERE = 512
_SIZE = _HEAD.size + _HITS.size + _WHERE


@dataclass(frozen=True, order=True)
class Cell:
    """One class of calls in the processes of one role."""

    role: str
    kind: str

    @property
    def place(self) -> int:
        return (1 + ROLES.index(self.role)) * len(CLASSES) + CLASSES.index(self.kind)


class Shim:
    """The file in `folder` that the processes of one server share. `env` is for the server."""

    def __init__(self, library: Path, folder: Path) -> None:
        file, self._stack = folder / "shared", folder / "stack"
        file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _SIZE)
        self.env = {"LD_PRELOAD": str(library), "NTH_FILE": str(file), "NTH_STACK": str(self._stack)}

    def arm(self, cell: Cell | None = None, nth: int = 0, error: int = 0) -> None:
        """Count from 1 from here on. The `nth` call of the cell fails; without a cell, none does."""
        self._memory[:8] = bytes(8)
        self._memory[_HEAD.size :] = bytes(_SIZE - _HEAD.size)
        self._stack.unlink(missing_ok=True)
        role, kind = (1 + ROLES.index(cell.role), CLASSES.index(cell.kind)) if cell else (0, 0)
        _HEAD.pack_into(self._memory, 0, 0, role, kind, nth, error, 0, 0)
        self._memory[:8] = (1).to_bytes(8, "little")

    def disarm(self) -> None:
        self._memory[:8] = bytes(8)

    @property
    def hits(self) -> dict[Cell, int]:
        counts = _HITS.unpack_from(self._memory, _HEAD.size)
        return {cell: counts[cell.place] for role in ROLES for kind in CLASSES if (cell := Cell(role, kind))}

    @property
    def failed(self) -> bool:
        """Whether the chosen call has come, and failed."""
        return bool(_HEAD.unpack_from(self._memory)[5])

    @property
    def where(self) -> str:
        """The call that failed, and the Python stack above it if the thread has one."""
        said = self._memory[_HEAD.size + _HITS.size :].rstrip(b"\0").decode(errors="replace")
        stack = self._stack.read_text(encoding="utf-8", errors="replace") if self._stack.exists() else ""
        return "\n".join([said, *stack.splitlines()[1:9]])


def compiler() -> str | None:
    """Return the C compiler, if there is one."""
    return shutil.which("cc")


def build(folder: Path) -> Path:
    """Compile the library into `folder`. Raises CalledProcessError when that fails."""
    library = folder / "nth_shim.so"
    flags = ("-shared", "-fPIC", "-O1", "-fno-builtin", "-U_FORTIFY_SOURCE", "-Wall")
    subprocess.run([compiler() or "cc", *flags, "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"], check=True)
    return library
