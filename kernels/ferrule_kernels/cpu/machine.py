"""The limits of this machine, measured in a second: `python -m ferrule_kernels.cpu.machine` prints it as JSON.

Rates are those of the processor's units with operands in registers, on all threads that torch would take. No product of
matrices is as fast; bandwidth is what decoding is held against.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ferrule_kernels.cpu import library

# Number in the kernel, what the processor must have, and what the rate is called. The fastest unit of a name counts.
_UNITS = (
    (0, frozenset[str](), "bf16"),
    (1, frozenset({"avx512f", "avx512_bf16"}), "bf16"),
    (2, frozenset({"avx512f", "avx512_vnni"}), "int8"),
    (3, frozenset({"avx2"}), "int8"),
    (4, frozenset({"amx_tile", "amx_bf16"}), "bf16"),
    (5, frozenset({"amx_tile", "amx_int8"}), "int8"),
)
_READ_BYTES = 512 << 20  # more than caches hold
_SECONDS = 0.15  # of the measurement of a unit; memory, which others use too, is given more


@dataclass(frozen=True)
class Limits:
    """Bytes and operations per second; a multiply-add is two operations.

    0.0 means that there is no way to measure it here.
    """

    threads: int
    read_bytes: float
    bf16: float
    int8: float


def measure() -> Limits:
    """Measure this machine's limits. Raises KernelsUnavailableError."""
    kernels: Any = library.load()
    kernels.ferrule_rate.restype = ctypes.c_double
    kernels.ferrule_rate.argtypes = (ctypes.c_int, ctypes.c_int64)
    kernels.ferrule_read.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    has_tiles = kernels.ferrule_use_tiles() == 0  # before there is a second thread
    here, rates = library.features(), {"bf16": 0.0, "int8": 0.0}
    threads = torch.get_num_threads()
    for unit, needed, name in _UNITS:
        if needed <= here and (has_tiles or "amx_tile" not in needed):
            rates[name] = max(rates[name], threads * _best(lambda n, u=unit: kernels.ferrule_rate(u, n)))  # type: ignore[misc]
    memory = torch.ones(_READ_BYTES, dtype=torch.uint8)

    def read(passes: int) -> float:
        for _ in range(passes):
            kernels.ferrule_read(memory.data_ptr(), _READ_BYTES)
        return float(passes * _READ_BYTES)

    return Limits(threads, _best(read, 4 * _SECONDS), rates["bf16"], rates["int8"])


def _best(work: Callable[[int], float], seconds: float = _SECONDS) -> float:
    """Return how much `work` does per second, the best of several runs that last long enough to be timed.

    `work` takes a number of rounds and returns how much it did.
    """
    rounds = 1
    while min(_timed(work, rounds) for _ in range(3)) < seconds / 10:  # the least: threads start late, others run
        rounds *= 2
    best, until = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < until:
        began = time.perf_counter()
        done = work(rounds)
        best = max(best, done / (time.perf_counter() - began))
    return best


def _timed(work: Callable[[int], float], rounds: int) -> float:
    """Return how many seconds so many rounds of `work` take."""
    began = time.perf_counter()
    work(rounds)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
