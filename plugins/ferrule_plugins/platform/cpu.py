"""`cpu`: the processor that everything has.

Types under `--dtype auto`: a bfloat16 checkpoint stays bfloat16, and one of float32 or float16 becomes bfloat16, where
the processor multiplies in bfloat16 (avx512_bf16, amx_bf16, or Arm's bf16), or has compiled kernels that widen it in
registers (AVX2 and more). Elsewhere both become float32, which torch multiplies faster. A type that is named is used as
it is.

Compute threads do not spin when they have nothing to do: on a shared machine a spinning thread turned a step of 2 ms
into 50 to 360 ms. At most `OMP_NUM_THREADS` threads are used.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ferrule.config import CacheConfig, DeviceSettings, SchedulerConfig
from ferrule.errors import ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.platform import DeviceCaps, Execution, Platform, Recorder
from ferrule.log import Log
from ferrule_kernels.cpu import dense, library
from ferrule_plugins.platform.cpu_kernels import cpu_kernels
from ferrule_plugins.platform.cpu_memory import CpuMemory, limit
from ferrule_plugins.platform.cpu_steps import step_recorder
from ferrule_plugins.platform.levels import optimization_level

_log = Log("platform")
_X86 = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "f16c"}
)
_ARM = frozenset({"asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"})
_COMPILED = 3  # the level of `-O` that compiles parts of models for a GPU
_FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_TYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


class CpuExecution(Execution):
    def prompt_share(self) -> int:
        """Return 2: a prompt's token costs about as much as a decoded one, so a short step has few of them."""
        return 2

    def recorder(self, config: DeviceSettings) -> Recorder | None:
        return step_recorder(config)

    def kernels(self) -> Kernels:
        return cpu_kernels()

    def profile(self, file: Path) -> Callable[[], None]:
        file.parent.mkdir(parents=True, exist_ok=True)
        recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        recorder.start()

        def end() -> None:
            recorder.stop()
            recorder.export_chrome_trace(str(file))

        return end


class CpuPlatform(Platform):
    """Threads, types and cache size on a CPU."""

    auto_order = 1  # every machine has a CPU: it is the last choice

    @classmethod
    def refuses(cls) -> str | None:
        return None

    def __init__(self) -> None:
        self._caps = describe()
        self._memory = CpuMemory(self._caps.memory_bytes)
        self._execution = CpuExecution()

    def prepare(self, config: DeviceSettings) -> DeviceCaps:
        """Bind this thread and size torch's pool: one thread for each physical core that this process may use.

        torch starts with OMP_NUM_THREADS, where that is set, or with all logical cores: more than that is never taken.
        """
        cores = min(bind(config.env.cpu_omp_threads_bind), torch.get_num_threads())
        torch.set_num_threads(cores)
        if config.cache.gpu_memory_utilization != CacheConfig().gpu_memory_utilization:
            _log.warning("--gpu-memory-utilization has no effect on CPU: --kv-cache-memory-bytes sizes the KV cache")
        if config.cache.cpu_offload_gb:
            _log.warning("--cpu-offload-gb has no effect on CPU: all weights are in its memory")
        for notice in without_effect(config):
            _log.warning(notice)
        features = ",".join(sorted(self._caps.features))
        _log.info("cpu ready", device=self._caps.name, threads=cores, features=features, kernels=library.used())
        return self._caps

    def device(self) -> torch.device:
        return torch.device("cpu")

    def dtype(self, requested: str, checkpoint: Mapping[str, Any]) -> torch.dtype:
        if requested != "auto":
            if requested not in _TYPES:
                raise ConfigError(f"--dtype {requested!r}: the CPU computes in {', '.join(_TYPES)}.")
            return _TYPES[requested]
        fast = self._caps.features & _FAST_BF16 or dense.unit() is not None
        return torch.bfloat16 if fast else torch.float32

    def attention_order(self) -> tuple[str, ...]:
        return ("cpu_native", "cpu", "torch_sdpa")

    def memory(self) -> CpuMemory:
        return self._memory

    def execution(self) -> CpuExecution:
        return self._execution


def without_effect(config: DeviceSettings) -> list[str]:
    """Return the warnings for options that are set and concern graphs for a GPU."""
    compilation = config.device.compilation_config
    found = []
    if config.scheduler.cuda_graph_sizes != SchedulerConfig().cuda_graph_sizes:
        found.append("--cuda-graph-sizes has no effect on CPU: steps of each number of rows are recorded")
    for key in sorted(compilation.keys() - {"level", "mode", "use_cudagraph"}):
        found.append(f"--compilation-config: {key} has no effect on CPU")
    if optimization_level(config) == _COMPILED:
        found.append("--compilation-config: level 3 is as level 2 on CPU: steps are recorded, and nothing is compiled")
    return found


def describe(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> DeviceCaps:
    """Return the processor's features, and how much memory this process may use."""
    name, flags = platform.processor() or platform.machine() or "CPU", frozenset[str]()
    for line in _lines(proc / "cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return DeviceCaps("cpu", name, limit(proc, cgroup), flags & (_X86 | _ARM) | {"host_memory"})


def bind(spec: str) -> int:
    """Follow FERRULE_CPU_OMP_THREADS_BIND; return how many threads to compute with.

    auto: no binding, one thread for each physical core available. nobind, all: the same for each logical one. A list
    such as 0-3,8: this thread, and those it starts, stay on these. Lists for several workers stand between |; there is
    one worker, the first. Raises ConfigError.
    """
    available = os.sched_getaffinity(0)
    if spec in ("auto", "nobind", "all"):
        cores = _physical(available) if spec == "auto" else available
        return max(1, min(len(cores), _quota()))
    lists = [parse_cores(part) for part in spec.split("|")]
    chosen = lists[0]
    if len(lists) > 1:
        _log.warning(f"FERRULE_CPU_OMP_THREADS_BIND={spec}: there is one worker, and the first list is its own")
    if not chosen <= available:
        missing = ",".join(map(str, sorted(chosen - available)))
        raise ConfigError(f"FERRULE_CPU_OMP_THREADS_BIND={spec}: this process may not use the cores {missing}.")
    os.sched_setaffinity(0, chosen)
    return len(chosen)


def parse_cores(spec: str) -> set[int]:
    """Parse a list of cores: '0-3,8' → {0, 1, 2, 3, 8}. Raises ConfigError."""
    cores: set[int] = set()
    for part in spec.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or len(low + high) > 10:
            raise ConfigError(
                f"FERRULE_CPU_OMP_THREADS_BIND must be auto, all, nobind or cores such as 0-3,8 (| between workers), "
                f"not {spec!r}."
            )
        first, last = int(low), int(high or low)
        if last < first or last - first > 65536:
            raise ConfigError(f"FERRULE_CPU_OMP_THREADS_BIND={spec}: {part.strip()!r} is not a range of cores.")
        cores.update(range(first, last + 1))
    return cores


def _physical(cores: set[int]) -> set[int]:
    """Return one of the logical cores that share a physical one, for each."""
    chosen = set()
    for core in cores:
        siblings = _first(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
        shared = parse_cores(siblings) & cores if siblings else {core}
        chosen.add(min(shared or {core}))
    return chosen


def _quota() -> int:
    """Return how many cores' worth of time the container may use; very many without a limit."""
    quota, _, period = _first(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return max(1, round(int(quota) / int(period))) if quota.isdigit() and period.isdigit() else 1 << 16


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or hidden by the container: the feature is not known to be there
        return []


def _first(file: Path) -> str:
    return next(iter(_lines(file)), "").strip()
