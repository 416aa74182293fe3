"""Limits of the system on a process, where they are too low to start with."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

from ferrule.errors import StartupError

MIN_FILES = 64  # files that a process must be able to open: a server without clients has some forty
# Bytes below which torch cannot be imported.
_MIN_MEMORY = {"-v": (resource.RLIMIT_AS, 512 << 20), "-d": (resource.RLIMIT_DATA, 256 << 20)}
_KIB = 1024  # bytes in the unit of ulimit
# Messages of the dynamic loader.
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "cannot map zero-fill pages")
_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_DISK = frozenset({errno.ENOSPC, errno.EROFS, errno.EDQUOT})


def check_limits() -> None:
    """Check the limits on open files. Raises StartupError where a server could not even start."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        raise StartupError(
            f"A process may open {files} files at once (ulimit -n); a server needs {MIN_FILES}, and one for each "
            "connection.",
            f"Raise the limit, to 1024 or more; the highest that is allowed here is {most}.",
        )


def check_memory() -> None:
    """Check the limits on memory. Raises StartupError where an engine could not even start, whatever the model."""
    for option, (number, least) in _MIN_MEMORY.items():
        limit, most = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY and limit < least:
            allowed = "unlimited" if most == resource.RLIM_INFINITY else str(most // _KIB)
            raise StartupError(
                f"A process may use {limit // _KIB} KiB of memory (ulimit {option}); an engine needs {least // _KIB}, "
                "and room for the model.",
                f"Raise the limit, or set none; the highest that is allowed here is {allowed}.",
            )


def memory_limits() -> str:
    """Return a sentence with the limits on memory of this process and its children; an empty one without limits."""
    limits = {option: resource.getrlimit(number)[0] for option, (number, _) in _MIN_MEMORY.items()}
    named = [f"ulimit {key} is {value // _KIB}" for key, value in limits.items() if value != resource.RLIM_INFINITY]
    return f"A limit on memory may be the reason: {', '.join(named)}." if named else ""


def as_startup_error(error: BaseException) -> StartupError | None:
    """Return the error as one block, if it says that the system lacks something; None for any other."""
    if any(map(_lacks_memory, _causes(error))):
        what = f" {error.message}" if isinstance(error, StartupError) else ""
        return StartupError(
            f"There is not enough memory to start.{what}",
            memory_limits() or "See what limits it: the memory limit of the container, or other processes.",
        )
    if isinstance(error, StartupError) and error.__cause__ is not None and memory_limits():
        # a library that does not check its allocations may fail in any way
        return type(error)(error.message, f"{error.hint}\n{memory_limits()}".strip())
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return StartupError(
            "No thread can be started: see ulimit -u, and the limit of the container on processes.", memory_limits()
        )
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
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, ImportError):
        return any(text in str(error) for text in _NO_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
