"""The measured limits of a device: how fast it copies memory, and how fast torch multiplies matrices on it.

Benchmarks compare the time of a kernel with them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 512 * 2**20  # several times the largest second-level cache; writing it also hides a launch's latency
_WARM_UP = 3
_FEWEST, _MOST = 5, 100  # repetitions
_SECONDS = 0.2  # for the repetitions of one measurement
_FP8_SINCE = (8, 9)  # compute capability
_BF16_SINCE = (8, 0)


@dataclass(frozen=True)
class Limits:
    """Rates of one device, per second. A product that it has no units for is None."""

    name: str
    copy_bytes: float  # read and written bytes of a device-to-device copy, added up
    half: str  # the 16-bit type that `half_flops` is of
    half_flops: float
    fp8_flops: float | None = None

    def seconds(self, num_bytes: int, flops: int, flops_rate: float | None = None) -> float:
        """Return the least time for work that moves `num_bytes` bytes and does `flops` operations."""
        return max(num_bytes / self.copy_bytes, flops / (flops_rate or self.half_flops))


def measure(device: torch.device, *, small: bool = False) -> Limits:
    """Measure a device, in about two seconds. `small` is for trying the measurement itself, on a CPU."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    half = torch.bfloat16 if device.type == "cpu" or capability >= _BF16_SINCE else torch.float16
    size = 128 if small else 8192
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    fp8 = _fp8_flops(device, size) if capability >= _FP8_SINCE else None
    half_name = str(half).removeprefix("torch.")
    return Limits(name, _copy_bytes(device, 2**16 if small else 2**30), half_name, _flops(device, half, size), fp8)


def seconds(run: Callable[[], object], device: torch.device, recorded: bool = True) -> float:
    """Return the median time of one run, in seconds.

    On a GPU the second-level cache holds none of the run's data beforehand, and the time is that of a graph of the
    run's launches, which is how a step of decode has them: without Python, which takes longer than a small kernel. A
    run that cannot be `recorded`, because it waits for the device, runs without a graph.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    for _ in range(_WARM_UP):
        run()
    launch = _recorded(run, device) if recorded else run
    first = _timed(launch, flush, 1)[0]
    return statistics.median(_timed(launch, flush, max(_FEWEST, min(_MOST, int(_SECONDS / max(first, 1e-6))))))


def _recorded(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        return run
    return graph.replay


def _timed(run: Callable[[], object], flush: torch.Tensor, count: int) -> list[float]:
    """Return the seconds of each of `count` runs, launched at once, so that the device never waits for Python."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(flush.device)
    return [begin.elapsed_time(end) / 1000 for begin, end in events]


def _copy_bytes(device: torch.device, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, recorded=False)  # in a graph copies are slower


def _flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b.t(), out=out), device)


def _fp8_flops(device: torch.device, size: int) -> float:
    """Measure `torch._scaled_mm`, torch's access to the library's product; its right factor must be column-major."""
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    run = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * size**3 / seconds(run, device)
