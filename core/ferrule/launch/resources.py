"""What the system gives to a process, where it is too little to start with."""

from __future__ import annotations

import errno
import resource

from ferrule.errors import StartupError

MIN_FILES = 64  # that a process must be able to open: a server without a client has some forty
_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_DISK = frozenset({errno.ENOSPC, errno.EROFS, errno.EDQUOT})


def check_limits() -> None:
    """Raises StartupError where a server could not even start."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        raise StartupError(
            f"A process may open {files} files at once (ulimit -n); a server needs {MIN_FILES}, and one for each "
            "connection.",
            f"Raise the limit, to 1024 or more; the highest that is allowed here is {most}.",
        )


def as_startup_error(error: BaseException) -> StartupError | None:
    """The error as one block, if it says that the system lacks something; None for any other."""
    if isinstance(error, MemoryError):
        return StartupError(
            "There is not enough memory to start.",
            "See what limits it: ulimit -v, the memory limit of the container, or other processes.",
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return StartupError("No thread can be started: see ulimit -u, and the limit of the container on processes.")
    if not isinstance(error, OSError):
        return None
    where = f": {error.filename}" if error.filename else ""
    if error.errno in _FILES:
        return StartupError(f"Too many files are open{where}.", "Raise the limit on open files (ulimit -n).")
    if error.errno in _DISK:
        return StartupError(f"A file cannot be written{where}: {error.strerror}.")
    if error.errno == errno.EIO:
        return StartupError(
            f"A file cannot be read or written{where}: {error.strerror}.", "See the system's log: a disk may fail."
        )
    if error.errno == errno.EAGAIN:
        return StartupError("No process can be started: see ulimit -u, and the limit of the container on processes.")
    if error.errno == errno.ENOMEM:
        return as_startup_error(MemoryError())
    return None
