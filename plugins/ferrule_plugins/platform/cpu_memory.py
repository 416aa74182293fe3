"""The memory of a CPU: how much of it there is now, and making what was allocated real.

Linux gives addresses freely, and a process that writes to more of them than there is memory for is killed. So the cache
gets its pages in parts, as long as there is memory for more; the kernel does that without touching what is in them
(MADV_POPULATE_WRITE, https://man7.org/linux/man-pages/man2/madvise.2.html, since 5.14). Where memory is plenty, that
happens beside the first steps, and a start does not wait for it. Limits of containers are files of control groups
(https://docs.kernel.org/admin-guide/cgroup-v2.html, memory interface files; for version 1,
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html).

A part is 64 MiB. Before each, what is left is read again, from the system and from the control groups: where the kernel
would have to kill, there is an error with advice instead. Nothing is locked.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ferrule.config import DeviceSettings
from ferrule.env import Environment
from ferrule.errors import ConfigError, StepTooLarge
from ferrule.interfaces.platform import DeviceMemory
from ferrule.log import Log
from ferrule.slow_start import waiting
from ferrule_kernels.cpu.pages import interleave, memory_nodes
from ferrule_plugins.freed_memory import give_back

_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_POPULATE_WRITE = 23
_HUGE = 2 << 20
_PART = 64 << 20  # bytes that are made real at once; a multiple of a huge page
_ASKED = 8 << 20  # bytes after which the system is asked again how much memory there is: it reads several files
_PAUSE = 7  # a thread that gets memory beside steps rests for so many times as long as it worked
_LONGEST_PAUSE = 0.1  # seconds: the end of the program waits for it
_SPARE = 128 << 20  # bytes that stay for steps and other processes
_THREADS = 8  # more do not help: memory is the limit
_ADVICE = (
    "Set --kv-cache-memory-bytes or, where it is given, --num-gpu-blocks-override to less, or give the process more "
    "memory."
)
_log = Log("platform")


class CpuMemory(DeviceMemory):
    """The memory of a CPU. `total` is how many bytes this process may use."""

    def __init__(self, total: int) -> None:
        self._total = total

    def cache_bytes(self, config: DeviceSettings) -> int:
        wanted = int(config.env.cpu_kvcache_space * 2**30)
        if wanted > self._total:
            there = self._total / 2**30
            raise ConfigError(
                f"The KV cache is to have {wanted / 2**30:.1f} GiB, but there are {there:.1f} GiB of memory.",
                "Set FERRULE_CPU_KVCACHE_SPACE (GiB) to less.",
            )
        return wanted

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeros that cost nothing until they are touched, so that the cache grows as it is used.

        They begin where a page does: pieces that are as large as a page then lie in one, and in whole cache lines.
        """
        size = math.prod(shape) * dtype.itemsize
        raw = np.zeros(size + mmap.PAGESIZE, np.uint8)
        start = -raw.ctypes.data % mmap.PAGESIZE
        return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)

    def keeps_more(self, config: DeviceSettings) -> bool:
        """Return whether the user has set the size: else memory that running requests cannot fill is left to others."""
        return config.env.cpu_kvcache_space != Environment().cpu_kvcache_space

    def check_weights(self, num_bytes: int) -> None:
        there = available()
        if num_bytes > there:
            raise ConfigError(
                f"The weights need {num_bytes / 2**30:.1f} GiB, but {there / 2**30:.1f} GiB of memory are available.",
                "Give the process more memory, or take a smaller or a quantized model.",
            )

    def check_cache(self, num_bytes: int) -> None:
        there = available() - _SPARE
        if num_bytes > there:
            raise _missing(num_bytes, there)

    def commit(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the memory real.

        If there is plenty, only begin: a thread continues. Raises ConfigError if there is too little.
        """
        wanted = sum(tensor.nbytes for tensor in tensors)
        parts = [part for tensor in tensors for part in _parts(tensor, _PART)]
        self.check_cache(wanted)
        there = available() - _SPARE
        nodes = memory_nodes()
        for address, size in parts:
            _library().madvise(address, size, _HUGEPAGE)  # in vain where there are none
            if len(nodes) > 1:
                interleave(address, size, nodes)  # any thread may read any block; in vain where it is not allowed
        if 2 * wanted < there and parts and _populate(parts[0][0], mmap.PAGESIZE):
            pieces = [[(weakref.ref(each), piece) for piece in _parts(each, _HUGE)] for each in tensors]
            beginnings_first = [piece for row in zip_longest(*pieces) for piece in row if piece]
            threading.Thread(target=_fill, args=(beginnings_first,), name="kv-cache-memory", daemon=False).start()
            return
        with waiting("the memory of the KV cache") as progress, ThreadPoolExecutor(_threads()) as pool:
            for number, _ in enumerate(pool.map(lambda part: _make_real(part, wanted), parts), 1):
                progress.step(f"{number} of {len(parts)} parts")

    @contextmanager
    def guard(self, stage: str) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
                raise
            there = f"{max(available(), 0) / 2**30:.1f} GiB are available, and ulimit -v or -d may allow less"
            if stage == "step":
                raise StepTooLarge(f"A step needs more memory than there is: {there}.") from error
            if stage == "cache":
                raise ConfigError(f"The KV cache cannot be allocated: {there}.", _ADVICE) from None
            raise ConfigError(
                f"The weights cannot be allocated: {there}.",
                "Give the process more memory, or take a smaller or a quantized model.",
            ) from None

    def trim(self) -> None:
        give_back()


def limit(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes this process may use at most: the machine's memory, or its container's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(most for most, _ in _groups(proc, cgroup))])


def available(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes can be had now without anything being killed.

    Swap counts, and so does memory of files that can be read again.
    """
    fields = dict(_fields(proc / "meminfo", ":"))
    free = fields.get("MemAvailable")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if free is not None:
        machine = (free + fields.get("SwapFree", 0)) << 10
    return min([machine, *(most - used for most, used in _groups(proc, cgroup))])


def _groups(proc: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of each control group around this process that has a limit.

    Cached files do not count as used.
    """
    for base, path, names in _places(proc, root):
        here = base / path.strip("/")
        for folder in (here, *here.parents):  # in a container the path may be the host's: then the root is its own
            if not folder.is_relative_to(base):
                break
            if (most := _number(folder / names[0])) is not None:
                stat = dict(_fields(folder / "memory.stat", " "))
                files = sum(stat.get(f"{names[2]}{kind}_file", 0) for kind in ("active", "inactive"))
                yield most, max((_number(folder / names[1]) or 0) - files, 0)


def _places(proc: Path, root: Path) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    """Yield the root of a version's control groups, this process's path there, and the names of files.

    The third of these names is the prefix of entries in memory.stat.
    """
    lines = [tuple(line.split(":", 2)) for line in _read(proc / "self" / "cgroup").splitlines() if line.count(":") > 1]
    for number, controllers, path in lines or [("0", "", "/")]:
        if number == "0":
            yield root, path, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield root / "memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _fields(file: Path, separator: str) -> Iterator[tuple[str, int]]:
    for line in _read(file).splitlines():
        name, _, value = line.partition(separator)
        number = value.split()[0] if value.split() else ""
        if number.isdigit():
            yield name, int(number)


def _number(file: Path) -> int | None:
    """Read a number; None for "max" and for a file that does not exist."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # not Linux, or hidden by the container
        return ""


def _threads() -> int:
    return max(1, min(len(os.sched_getaffinity(0)), _THREADS))


def _parts(tensor: torch.Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of whole pages, cut where huge pages begin, `most` bytes each."""
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    while start < end:
        stop = min((start + most) // _HUGE * _HUGE, end)
        yield start, stop - start
        start = stop


def _make_real(part: tuple[int, int], wanted: int) -> None:
    address, size = part
    there = available() - _SPARE
    if size > there:
        raise _missing(wanted, there)
    if not _populate(address, size):
        ctypes.memset(address, 0, size)  # what is there is zeros


def _fill(parts: Sequence[tuple[weakref.ref[torch.Tensor], tuple[int, int]]]) -> None:
    """Make parts of tensors real, beside all else that runs. Ends when one is gone, as when the server sleeps.

    Parts are small, and the thread rests between them, since anything that changes the process's addresses waits for
    the end of a part. It has no low priority: beside busy processes it would then be held up while it has a lock that
    steps need, such as the interpreter's, and all would wait for it. It ends with the main thread, too, and is waited
    for: the interpreter may not go away under it, since it may be the last that holds a tensor, and a thread that frees
    one then aborts the process.
    """
    room = 0  # bytes that may be made real before the system is asked again
    for tensor, (address, size) in parts:
        began = time.perf_counter()
        kept = tensor()  # addresses are a tensor's own as long as it is there
        if kept is None or not threading.main_thread().is_alive():
            return
        if size > room:
            room = min(available() - _SPARE, _ASKED)
        if size > room:
            _log.error("The KV cache does not have all of its memory yet, and others have taken the rest. %s", _ADVICE)
            return
        _populate(address, size)
        room -= size
        del kept  # it may be let go meanwhile
        time.sleep(min(_PAUSE * (time.perf_counter() - began), _LONGEST_PAUSE))


def _populate(address: int, size: int) -> bool:
    """Give pages memory, whatever they contain.

    Returns False where the kernel cannot; without memory, it kills the process.
    """
    return not _library().madvise(address, size, _POPULATE_WRITE)


def _missing(wanted: int, there: int) -> ConfigError:
    return ConfigError(
        f"The KV cache is to have {wanted / 2**30:.2f} GiB, but {max(there, 0) / 2**30:.2f} GiB of memory are "
        "available for it.",
        _ADVICE,
    )


@cache
def _library() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
