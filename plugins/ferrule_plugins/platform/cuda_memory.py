"""The division of a GPU's memory, and advice to the user when it is not enough.

`--gpu-memory-utilization` is the share of the device that this instance may use, whatever other processes do. It holds
the weights, the memory of the largest step, which a rehearsal measures, the memory set aside for graphs, and what
CUDA's libraries have allocated since the start. The KV cache gets the rest, but never more than is free on the device:
other processes may use some of it.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError, StepTooLarge

_GIB = 2**30
_HEADROOM = 512 * 2**20  # bytes left free for libraries, where the share would take everything
_LEAST_CACHE = 256 * 2**20  # bytes that a suggestion leaves for the cache
_FEWEST_TOKENS = 128
_MOST = 0.98  # of the device, that a suggestion takes


@dataclass(frozen=True)
class Reading:
    """Bytes of a device: in all, free, and allocated by PyTorch in this process (in use or cached)."""

    total: int
    free: int
    allocated: int

    @property
    def elsewhere(self) -> int:
        """Used by other processes, and by CUDA and its libraries in this one."""
        return max(0, self.total - self.free - self.allocated)


class Device(Protocol):
    """A GPU: the readings and operations that the platform needs."""

    def name(self) -> str: ...

    def capability(self) -> tuple[int, int]: ...

    def read(self) -> Reading: ...

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """Return the most bytes that PyTorch had allocated since `reset_peak`."""
        ...

    def synchronize(self) -> None: ...

    def map_host(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of the host's memory, as a uint8 tensor of the device, which reads them over the bus.

        Raises ConfigError where the host has no such memory.
        """
        ...

    def give_back(self) -> None:
        """Return cached memory of the allocator to the device."""
        ...


class TorchDevice:
    """A GPU as torch sees it: the current device, which is the first of CUDA_VISIBLE_DEVICES."""

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability()

    def read(self) -> Reading:
        free, total = torch.cuda.mem_get_info()
        return Reading(total, free, torch.cuda.memory_reserved())

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def map_host(self, size: int) -> torch.Tensor:
        return torch.as_tensor(_Mapped(size), device="cuda")

    def give_back(self) -> None:
        """Free cached memory and cuBLAS's workspaces: torch keeps 32 MiB for each thread and stream that multiplied."""
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class _Mapped:
    """Page-locked host memory that the device has in its address space, for as long as this object lives.

    It is registered rather than pinned by torch, whose allocator takes the next power of two.
    """

    def __init__(self, size: int) -> None:
        host = torch.empty(size, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        if status:
            raise ConfigError(
                f"--cpu-offload-gb: the host has no {gib(size)} of memory to lock (CUDA's error {status}).",
                "Set it to less.",
            )
        self.__cuda_array_interface__ = {
            "data": (host.data_ptr(), False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        weakref.finalize(self, _unmap, host).atexit = False


def _unmap(host: torch.Tensor) -> None:
    torch.cuda.synchronize()  # kernels that are queued may still read it
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]


@dataclass
class Budget:
    """The bytes of one instance on one device.

    `begin` is called when nothing is loaded, `learn` when the weights are.
    """

    device: Device
    config: DeviceSettings = field(init=False)  # once it has begun
    total: int = 0
    others: int = 0  # bytes used elsewhere when this instance began
    step: int = 0  # that the largest step needs beside the weights
    graphs: int = 0  # that recorded graphs may take

    def begin(self, config: DeviceSettings) -> Reading:
        now = self.device.read()
        self.config, self.total, self.others = config, now.total, now.elsewhere
        return now

    def learn(self, weights: int) -> None:
        """Note the memory of the largest step, which has run since `reset_peak`. `weights`: their bytes."""
        self.step = max(0, self.device.peak() - weights)

    def cache(self) -> int:
        """Return how many bytes the KV cache gets. Raises ConfigError where none are left."""
        now, share = self.device.read(), self.config.cache.gpu_memory_utilization
        libraries = max(0, now.elsewhere - self.others)
        left = int(share * now.total) - now.allocated - self.step - self.graphs - libraries
        free = now.free - self.step - self.graphs - _HEADROOM
        if self.config.cache.num_gpu_blocks_override is not None:
            return max(left, free, 0)  # the cache is what the user says it is
        if min(left, free) > 0:
            return min(left, free)
        needs = f"weights {gib(now.allocated)}, the largest step {gib(self.step)}, CUDA's libraries {gib(libraries)}"
        if left <= 0:
            said = f"--gpu-memory-utilization {share:g} is {gib(int(share * now.total))} of {gib(now.total)}"
        else:
            said = f"Of {gib(now.total)}, other processes hold {gib(self.others)} and {gib(now.free)} are free"
        raise ConfigError(
            f"{said}: there is no room for a KV cache beside {needs}.", self._cache_advice(now, libraries)
        )

    def too_little(self, stage: str) -> ConfigError | StepTooLarge:
        """Return the error for a device without memory in `stage`: "load", "rehearsal", "cache" or "step"."""
        now = self.device.read()
        figures = f"{gib(now.allocated)} used by this instance, {gib(now.elsewhere)} elsewhere, {gib(now.free)} free"
        told = f"the GPU has {gib(now.total)}: {figures}."
        if stage == "load":
            return ConfigError(f"The weights do not fit: {told}", self._load_advice(now))
        if stage == "rehearsal":
            return ConfigError(f"The largest step does not fit beside the weights: {told}", self._smaller_step())
        section = self.config.cache
        less = f"--gpu-memory-utilization {self._less(now):.2f}"
        if section.num_gpu_blocks_override is not None:
            less = f"--num-gpu-blocks-override to less than {section.num_gpu_blocks_override}"
        elif section.kv_cache_memory_bytes is not None:
            less = f"--kv-cache-memory-bytes to less than {section.kv_cache_memory_bytes}"
        if stage == "cache":
            return ConfigError(f"The KV cache does not fit: {told}", f"Set {less}.")
        return StepTooLarge(f"A step does not fit: {told} Set {less}, or {self._smaller_step(lower=True)}")

    # ------------------------------------------------------------------------------------ what to change

    def _cache_advice(self, now: Reading, libraries: int) -> str:
        wanted = now.allocated + self.step + self.graphs + libraries + _LEAST_CACHE
        share = math.ceil(100 * wanted / now.total) / 100
        if share <= _MOST and wanted - now.allocated + _HEADROOM <= now.free:
            return f"Set --gpu-memory-utilization {share:.2f} or more."
        if self.step > _LEAST_CACHE:
            return self._smaller_step()
        return self._load_advice(now)

    def _load_advice(self, now: Reading) -> str:
        if now.elsewhere > now.total // 10:
            return "End the other processes on this GPU, or choose another one with CUDA_VISIBLE_DEVICES."
        if self.config.dtype in ("float", "float32"):
            return "Set --dtype bfloat16, which halves the weights."
        return (
            "Serve quantized weights (--quantization), leave some GiB of them with the host (--cpu-offload-gb), or use "
            "a GPU with more memory."
        )

    def _smaller_step(self, *, lower: bool = False) -> str:
        """Return advice to halve the option that decides a step's size: tokens, or rows where these are all it has."""
        section = self.config.scheduler
        tokens, seqs = section.max_num_batched_tokens, section.max_num_seqs
        if tokens // 2 >= max(_FEWEST_TOKENS, seqs):
            said = f"--max-num-batched-tokens {tokens // 2}."
        else:
            said = f"--max-num-seqs {max(1, seqs // 2)} and --max-num-batched-tokens {max(seqs, tokens // 2)}."
        return said if lower else f"Set {said}"

    def _less(self, now: Reading) -> float:
        """Return a share of the device that leaves the headroom free, in hundredths, and less than now."""
        share = self.config.cache.gpu_memory_utilization
        shortage = max(0, _HEADROOM - now.free) / max(1, now.total)
        return max(0.05, math.floor(100 * (share - max(0.05, shortage))) / 100)


def gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
