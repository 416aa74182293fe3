"""Recorded steps on a CPU: a decode step's hundreds of calls are a list that C++ walks.

Each number of rows, and of tokens where rows have several, has a recording of its own, so nothing is padded. It is made
by the second step with that many: what a model prepares once is there then. The first recording of a model is tested:
the memory between inputs and output is overwritten, and what is replayed must have the same bits as what was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrule.config import DeviceSettings
from ferrule.interfaces.platform import Recorder, StepInput
from ferrule.log import Log
from ferrule_kernels.cpu.recording import Arena, Function, NotRecordableError, Recording
from ferrule_plugins.platform.levels import optimization_level

MOST_ROWS = 256  # beyond, Python is a small part of a step
_NAN = 0xFF  # as each byte of a float
_SHOWN = 200  # characters of an error
_TRIES = 2  # the first may fail by chance: a debugger or a profiler that looks at frames keeps the tensors in them

Sizes = tuple[int, ...]  # of the inputs: of rows, and tokens
PutBack = Callable[[], None]
Keep = Callable[[], PutBack]

_log = Log("platform")


class StepRecorder(Recorder):
    """A recorder of steps. Steps that cannot be recorded are launched as they are, which is logged once for a model."""

    stateful = ragged = True

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.forget()

    def run(self, inputs: Sequence[StepInput], compute: Function) -> torch.Tensor | None:
        return self.run_stateful(inputs, compute, _no_states)

    def run_stateful(self, inputs: Sequence[StepInput], compute: Function, keep: Keep) -> torch.Tensor | None:
        values = [values for values, _ in inputs]
        sizes = tuple(map(len, values))
        if self._failures == _TRIES or sizes[0] > MOST_ROWS:
            return None
        recording = self._recordings.get(sizes)
        if recording is not None:
            recording.fill(values)
            return recording.replay()
        if sizes in self._seen:
            return self._record(sizes, values, compute, keep)
        self._seen.add(sizes)
        return None

    def warm(self, inputs: Sequence[StepInput], compute: Function) -> None:
        """Do nothing: steps are recorded when they occur."""

    def forget(self) -> None:
        self._failures = 0
        self._start_over()

    def _start_over(self) -> None:
        self._arena = Arena()
        self._recordings: dict[Sizes, Recording] = {}
        self._seen: set[Sizes] = set()  # of steps that there were

    def _record(self, sizes: Sizes, values: list[torch.Tensor], compute: Function, keep: Keep) -> torch.Tensor | None:
        put_back = keep()
        try:
            recording = Recording(self._arena, values, compute)
            if not self._recordings:
                _check(self._arena, recording, values, put_back)
        except Exception as error:  # if the model's code is at fault, and not the recording, it will fail again
            put_back()
            self._start_over()
            self._failures += 1
            message = "steps of this model are not recorded" if self._failures == _TRIES else "a step was not recorded"
            _log.info(message, reason=f"{type(error).__name__}: {error}"[:_SHOWN])
            return None
        self._recordings[sizes] = recording
        return recording.output


def step_recorder(config: DeviceSettings) -> Recorder | None:
    """Return the recorder, or None where the options say that steps are not recorded. Raises ConfigError."""
    if optimization_level(config) == 0 or not config.device.compilation_config.get("use_cudagraph", True):
        return None
    return StepRecorder(config.max_seq_len_to_capture)


def _no_states() -> PutBack:
    return lambda: None


def _check(arena: Arena, recording: Recording, values: list[torch.Tensor], put_back: PutBack) -> None:
    """Raise NotRecordableError unless a replay gives the same: a third party's kernel may be missing in the list."""
    computed = recording.output.clone()
    put_back()
    arena.fill(_NAN)
    recording.fill(values)
    if not torch.equal(recording.replay().view(torch.uint8), computed.view(torch.uint8)):
        raise NotRecordableError("a kernel was called that is not recorded")
