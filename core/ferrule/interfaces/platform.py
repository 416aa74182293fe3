"""`platform`: a kind of device. Entry point name = what `--device` takes.

Its contract has three roles: `Platform` is the device, `DeviceMemory` its memory, `Execution` how steps run there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ferrule.errors import RequestError
from ferrule.interfaces.kernels import Kernels

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ferrule.config import DeviceSettings
    from ferrule.interfaces.model import Model


@dataclass(frozen=True)
class DeviceCaps:
    """The abilities of a device. `features` are names such as "avx512_bf16", "amx_bf16", "sm90".

    Attention backends and quantization methods ask for these: "host_memory", tensors lie in the host's memory; "cuda",
    libraries for NVIDIA GPUs run; "triton", Triton's kernels do.
    """

    platform: str
    name: str
    memory_bytes: int
    features: frozenset[str] = frozenset()


class Copies:
    """Tensors on their way to the host. These have arrived. Any thread may ask, more than once."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def done(self) -> bool:
        """Return whether `wait` would not block."""
        return True

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the host, once they are there."""
        return self._tensors


class Transfers:
    """The way of tensors between the host and a device. This one waits for each copy, as is right where they share
    memory.
    """

    def stage(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copy tensors of the host to `device`, for what is launched next, without waiting for what was launched
        before.

        The caller does not change the host's tensors afterwards. Returned tensors may share memory, with each other and
        with the host's.
        """
        return [tensor.to(device) for tensor in tensors]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Copies:
        """Begin to copy tensors to the host."""
        return Copies([tensor.cpu() for tensor in tensors])


class StepInput(NamedTuple):
    """One input of a step. The first dimension of `values` is the rows; `fill` is what rows are padded with."""

    values: torch.Tensor  # on the host
    fill: int


class Recorder(ABC):
    """A launcher of whole forward passes as recordings, for steps in which every row computes one token.

    Recordings are made for some numbers of rows; a step with fewer may be padded. With `ragged`, rows may have several
    tokens each; such a step must not be padded. Called on the worker's thread only.
    """

    max_len: int  # a step with a longer context, in tokens, is not recorded
    ragged = False
    stateful = False  # whether it has `run_stateful`; if not, steps of models with states are launched as they are

    @abstractmethod
    def run(
        self, inputs: Sequence[StepInput], compute: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor | None:
        """Return what `compute` makes [rows, …] of the inputs on the device, or None when this step has to be launched
        as it is.

        `compute` may be called with padded inputs, several times, and while it is recorded: it must not wait for the
        device, and must do the same work for the same inputs. The returned tensor is valid until the next call.
        """

    def run_stateful(
        self,
        inputs: Sequence[StepInput],
        compute: Callable[[list[torch.Tensor]], torch.Tensor],
        keep: Callable[[], Callable[[], None]],
    ) -> torch.Tensor | None:
        """Run like `run`, for a model whose states `compute` changes.

        No row may be padded. After `compute` was called, the states must be as after one step where a result is
        returned, and as before it where not: `keep` copies those of the rows, and returns a function that puts them
        back.
        """
        raise NotImplementedError(f"{type(self).__name__} records no steps of models with states")

    @abstractmethod
    def warm(self, inputs: Sequence[StepInput], compute: Callable[[list[torch.Tensor]], torch.Tensor]) -> bool | None:
        """Record what start-up has time for. The inputs have no rows.

        True where there is more to record: it is called again while no request has come yet.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop all recordings: the weights or the cache are about to move."""


class DeviceMemory(ABC):
    """The memory of a device: what of it the cache gets, and what to do where it does not suffice."""

    @abstractmethod
    def cache_bytes(self, config: DeviceSettings) -> int:
        """Return the bytes for the KV cache, once the weights are loaded. Raises ConfigError where none are left."""

    def loading(self, model: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Pass on the weights on their way into `model`, by name. Between two of them, loaded ones may be moved."""
        return weights

    def check_weights(self, num_bytes: int) -> None:
        """Raise ConfigError if weights of this size, all of which are in the memory at once, cannot fit.

        Called before they are loaded; not for weights that are quantized meanwhile. The default checks nothing.
        """

    def check_cache(self, num_bytes: int) -> None:
        """Raise ConfigError if a cache of this size, with the states of requests, cannot fit.

        `--dry-run` calls it, when no weights are in the memory. The default checks nothing.
        """

    def keeps_more(self, config: DeviceSettings) -> bool:
        """Return whether the cache is to have all of `cache_bytes`, also what running requests cannot fill: it keeps
        prefixes.

        False: it has no more than the requests that run at a time can fill.
        """
        return True

    def commit(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the memory of cache and states real, all of it zeros that may not have been written yet.

        Raises ConfigError where it is not there. The default does nothing, as is right where to allocate is enough.
        """

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a part of the cache, or of states, in memory that is taken when it is written.

        The default returns None: torch allocates it.
        """
        return None

    def rehearse(self, step: Callable[[], None]) -> None:
        """Measure what a step needs beside weights and cache: `step` computes the largest one, without a cache.

        Called once, after the weights are loaded and before `cache_bytes`. The default does not run it.
        """

    def guard(self, stage: str) -> AbstractContextManager[None]:
        """Turn the device's errors in `stage` ("load", "cache", "step") into errors that say what to change.

        Those of "step" are StepTooLarge where nothing but memory was missing.
        """
        return nullcontext()

    def trim(self) -> None:
        """Give memory that was freed back to the system or the device."""


class Execution:
    """The way in which steps run on a device. The defaults are right for one that shares the host's memory, and for
    whose results the host waits.
    """

    def depth(self) -> int:
        """Return how many steps in flight pay off here: 2 where the device computes while the host plans."""
        return 1

    def prompt_share(self) -> int:
        """Guess what tokens of prompts cost: 32 times as many as this take as long as a step without them.

        The scheduler learns from its steps what they cost, and gives prompts a part of each step by it. 0: they cost so
        little that a step may have any number of them.
        """
        return 0

    def optimise(self, model: Model, config: DeviceSettings) -> None:
        """Change how parts of a model compute, in place, once its weights are there."""

    def kernels(self) -> Kernels:
        """Return what layers, quantized weights and samplers compute with here. The default has none: torch does it.

        Called once for a model, before it is built.
        """
        return Kernels()

    def transfers(self) -> Transfers:
        """Return what brings a step's inputs to the device, and its results back."""
        return Transfers()

    def recorder(self, config: DeviceSettings) -> Recorder | None:
        """Return a launcher of recorded steps, or None where steps are launched as they are.

        Called once for each model that runs, before `DeviceMemory.cache_bytes`, which leaves recordings their memory.
        """
        return None

    def profile(self, file: Path) -> Callable[[], None]:
        """Record what this thread computes until the returned function is called, which writes the trace to `file`."""
        raise RequestError("There is no profiler for this device.")


class Platform(ABC):
    """A device. `prepare` is called first, and what `memory` and `execution` return stays in use: it may keep state.

    `--device auto` asks platforms by their `auto_order`, the lowest first; it is a literal of the class itself, because
    it is read without an import.
    """

    auto_order: ClassVar[int] = 0

    @classmethod
    @abstractmethod
    def refuses(cls) -> str | None:
        """Say why this platform is not usable on this machine, or return None. Must be cheap."""

    @abstractmethod
    def prepare(self, config: DeviceSettings) -> DeviceCaps:
        """Set up the device for this process (threads, allocator) and describe it."""

    @abstractmethod
    def device(self) -> torch.device:
        """Return the device on which parameters and cache live."""

    @abstractmethod
    def dtype(self, requested: str, checkpoint: Mapping[str, Any]) -> torch.dtype:
        """Resolve `--dtype`. Raises ConfigError for a type that the device cannot compute in."""

    @abstractmethod
    def attention_order(self) -> tuple[str, ...]:
        """Return the names of attention backends, first choice first."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return the device's memory."""

    def execution(self) -> Execution:
        """Return how steps run on the device."""
        return Execution()
