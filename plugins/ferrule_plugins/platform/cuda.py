"""`cuda`: one NVIDIA GPU, the first of CUDA_VISIBLE_DEVICES.

Types under `--dtype auto`: a float16 checkpoint stays float16, all others become bfloat16 from compute capability 8.0
on, and float16 on older devices, which cannot compute in bfloat16. Any other `--dtype` is used as given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.kernels import Kernels
from ferrule.interfaces.model import Model
from ferrule.interfaces.platform import DeviceCaps, DeviceMemory, Execution, Platform, Recorder, Transfers
from ferrule.log import Log
from ferrule_kernels import cuda
from ferrule_plugins.platform.cpu import describe
from ferrule_plugins.platform.cuda_compile import compile_parts
from ferrule_plugins.platform.cuda_graphs import GraphLimits, graph_recorder, warn_of_unread
from ferrule_plugins.platform.cuda_kernels import cuda_kernels
from ferrule_plugins.platform.cuda_memory import Budget, Device, Reading, TorchDevice, gib
from ferrule_plugins.platform.cuda_offload import HostWeights
from ferrule_plugins.platform.cuda_stage import PinnedTransfers
from ferrule_plugins.platform.levels import optimization_level

_log = Log("platform")
_DEVICE = torch.device("cuda")
_OLDEST = (7, 0)  # compute capability that Triton generates code for
_BF16_SINCE = (8, 0)
_TYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


class CudaMemory(DeviceMemory):
    """The memory of a GPU, divided by measurement. `begin` is called before anything is loaded."""

    def __init__(self, device: Device, budget: Budget) -> None:
        self._device = device
        self._budget = budget
        self._offloaded = 0  # bytes of weights that the host keeps

    def begin(self, config: DeviceSettings) -> Reading:
        """Take a reading before anything is loaded.

        Raises ConfigError if the host lacks memory for the weights it is to keep.
        """
        now = self._budget.begin(config)
        memory = describe().memory_bytes
        self._offloaded = int(config.cache.cpu_offload_gb * 2**30)
        if self._offloaded > memory:
            raise ConfigError(
                f"--cpu-offload-gb {config.cache.cpu_offload_gb:g}: the host has {gib(memory)} of memory."
            )
        return now

    def loading(self, model: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        if not self._offloaded:
            return weights
        return HostWeights(self._offloaded, self._device.map_host, _DEVICE).loading(model, weights)

    def rehearse(self, step: Callable[[], None]) -> None:
        """Run the largest step and measure the memory that it needs. Raises ConfigError where it does not fit."""
        self._device.give_back()
        weights = self._device.read().allocated
        self._device.reset_peak()
        with self.guard("rehearsal"):
            step()
            self._device.synchronize()
        self._budget.learn(weights)
        self._device.give_back()

    def cache_bytes(self, config: DeviceSettings) -> int:
        given = self._budget.cache()
        now = self._device.read()
        _log.info(
            "memory shared out",
            total=gib(now.total),
            weights=gib(now.allocated),
            step=gib(self._budget.step),
            graphs=gib(self._budget.graphs),
            others=gib(self._budget.others),
            cache=gib(given),
        )
        return given

    @contextmanager
    def guard(self, stage: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._budget.too_little(stage) from error

    def trim(self) -> None:
        self._device.give_back()


class CudaExecution(Execution):
    """Execution with two steps in flight, pinned buffers and graphs."""

    def __init__(self, device: Device, budget: Budget) -> None:
        self._device = device
        self._budget = budget
        self._transfers = PinnedTransfers()
        self._warned = False

    def depth(self) -> int:
        return 2

    def optimise(self, model: Model, config: DeviceSettings) -> None:
        if optimization_level(config) == 3:
            compile_parts(model)

    def kernels(self) -> Kernels:
        return cuda_kernels()

    def transfers(self) -> Transfers:
        return self._transfers

    def recorder(self, config: DeviceSettings) -> Recorder | None:
        """Return a recorder of graphs, unless the options forbid them; the cache leaves each its memory."""
        if not self._warned:  # a server may have several recorders
            warn_of_unread(config)
        self._warned = True
        limits = GraphLimits.of(config)
        self._budget.graphs += 0 if limits is None else limits.budget_bytes
        return graph_recorder(limits, self._transfers, _DEVICE)

    def profile(self, file: Path) -> Callable[[], None]:
        file.parent.mkdir(parents=True, exist_ok=True)
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        recorder = torch.profiler.profile(activities=kinds, record_shapes=True)
        recorder.start()

        def end() -> None:
            self._device.synchronize()
            recorder.stop()
            recorder.export_chrome_trace(str(file))

        return end


class CudaPlatform(Platform):
    """The platform of a GPU. Tests pass a `device` in its place."""

    @classmethod
    def refuses(cls) -> str | None:
        """Ask the driver's management library, which starts nothing on the GPU."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        if torch.cuda.device_count() == 0:
            return "there is no NVIDIA GPU (or CUDA_VISIBLE_DEVICES hides it, or the driver is missing)"
        return None

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = TorchDevice() if device is None else device
        budget = Budget(self._device)
        self._memory = CudaMemory(self._device, budget)
        self._execution = CudaExecution(self._device, budget)
        self._capability = (0, 0)

    def prepare(self, config: DeviceSettings) -> DeviceCaps:
        """Start CUDA in this process. Raises ConfigError for a GPU that is too old."""
        name, self._capability = self._device.name(), self._device.capability()
        version = ".".join(map(str, self._capability))
        if self._capability < _OLDEST:
            raise ConfigError(f"{name} has compute capability {version}; 7.0 is the least.", "Use --device cpu.")
        now = self._memory.begin(config)
        features = {"cuda", "sm{}{}".format(*self._capability)} | ({"triton"} if cuda.available() is None else set())
        _log.info("cuda ready", device=name, capability=version, memory=gib(now.total), free=gib(now.free))
        return DeviceCaps("cuda", name, now.total, frozenset(features))

    def device(self) -> torch.device:
        return _DEVICE

    def dtype(self, requested: str, checkpoint: Mapping[str, Any]) -> torch.dtype:
        bf16 = self._capability >= _BF16_SINCE
        if requested == "auto":
            of_checkpoint = str(checkpoint.get("dtype") or checkpoint.get("torch_dtype"))
            if bf16 or of_checkpoint == "float16":
                return torch.float16 if of_checkpoint == "float16" else torch.bfloat16
            _log.warning("this GPU does not compute in bfloat16: float16 is used, whose range is smaller")
            return torch.float16
        if requested not in _TYPES:
            raise ConfigError(f"--dtype {requested!r}: the GPU computes in {', '.join(_TYPES)}.")
        if requested == "bfloat16" and not bf16:
            raise ConfigError(
                "--dtype bfloat16: this GPU does not compute in it (compute capability 8.0 does).",
                "Set --dtype float16 or --dtype float32.",
            )
        return _TYPES[requested]

    def attention_order(self) -> tuple[str, ...]:
        """Return our own kernels first, which need no package; those of other packages are used when they are named."""
        return ("triton", "torch_sdpa")

    def memory(self) -> CudaMemory:
        return self._memory

    def execution(self) -> CudaExecution:
        return self._execution
