"""CUDA graphs: the hundreds of launches of a decode step become one.

A graph is recorded for a number of rows and replayed for that many or fewer; missing rows are padded with rows that
have no context and write nothing. All graphs read their inputs from one buffer and leave their output in another, so
that a step costs one copy and one launch; intermediate tensors of all graphs share one pool, because only one graph
runs at a time. Start-up records graphs for a few seconds; the others are recorded when their size is first needed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrule.config import DeviceSettings
from ferrule.errors import ConfigError
from ferrule.interfaces.platform import Recorder, StepInput
from ferrule.log import Log
from ferrule_plugins.platform.cuda_stage import Layout, PinnedTransfers
from ferrule_plugins.platform.levels import optimization_level

GRAPH_BYTES = 8 << 20  # on the device, of a graph of some hundred launches
POOL_BYTES = 160 << 20  # what lies between the inputs and the output of the largest; 64 MiB are cuBLAS's, and its code
WARM_SECONDS = 3.0  # of start-up
MOST_ROWS = 1 << 16  # of a graph
_READ = frozenset({"level", "mode", "use_cudagraph", "cudagraph_capture_sizes", "max_capture_size"})

Compute = Callable[[list[torch.Tensor]], torch.Tensor]
Capture = Callable[[Callable[[], None]], Callable[[], None]]

_log = Log("platform")


@dataclass(frozen=True)
class GraphLimits:
    """The limits of recording: `sizes` are ascending numbers of rows; `max_len` is the longest context, in tokens."""

    sizes: tuple[int, ...]
    max_len: int
    budget_bytes: int  # of the device's memory: what the cache must leave
    warm_seconds: float = WARM_SECONDS

    @classmethod
    def of(cls, config: DeviceSettings) -> GraphLimits | None:
        """Return the limits that the options ask for; None where steps are not to be recorded. Raises ConfigError."""
        given = config.device.compilation_config
        if optimization_level(config) == 0 or not given.get("use_cudagraph", True):
            return None
        rows = config.scheduler.max_num_seqs
        sizes = _sizes(config.scheduler.cuda_graph_sizes, given)
        useful = sizes[: bisect_left(sizes, rows) + 1]
        budget = POOL_BYTES + GRAPH_BYTES * len(useful)
        max_len = config.max_seq_len_to_capture
        return cls(useful, max_len, budget) if useful and max_len else None


def warn_of_unread(config: DeviceSettings) -> None:
    """Log the keys of --compilation-config that nothing reads."""
    unread = ", ".join(sorted(config.device.compilation_config.keys() - _READ))
    if unread and optimization_level(config):
        _log.warning(f"--compilation-config: {unread} has no effect here")


def _sizes(given: Sequence[int], compilation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes, ascending. One number n means 1, 2, 4, and the multiples of 8 up to n. Raises ConfigError."""
    exact = compilation.get("cudagraph_capture_sizes")
    sizes = list(given) if exact is None else exact
    if exact is None and len(sizes) == 1 and sizes[0]:
        sizes = [1, 2, 4, *range(8, sizes[0] + 1, 8)]
    limit = compilation.get("max_capture_size")
    numbers = [*sizes, *([] if limit is None else [limit])] if isinstance(sizes, list) else [None]
    if any(type(size) is not int or not 0 <= size <= MOST_ROWS for size in numbers):
        raise ConfigError(
            f"The sizes of graphs are numbers of rows, at most {MOST_ROWS}.", "For example --cuda-graph-sizes 1 2 4 8."
        )
    return tuple(sorted({size for size in sizes if size and (limit is None or size <= limit)}))


@dataclass(frozen=True)
class Recording:
    """The launches for one number of rows, which read `inputs` and write the first rows of the output."""

    layout: Layout
    inputs: list[torch.Tensor]
    replay: Callable[[], None]


class GraphRecorder(Recorder):
    """A recorder of CUDA graphs, which chooses sizes, pads rows and owns the static buffers.

    `capture` records a function and returns one that replays it. Where a model cannot be recorded, or the memory that
    was set aside is used up, steps are launched as they are; the log says so once.
    """

    def __init__(
        self,
        limits: GraphLimits,
        transfers: PinnedTransfers,
        device: torch.device,
        capture: Callable[[], Capture],
        free_bytes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_len = limits.max_len
        self._limits = limits
        self._transfers = transfers
        self._device = device
        self._make_capture = capture
        self._free_bytes = free_bytes
        self._clock = clock
        self._stopped = False  # nothing more is recorded
        self._start()

    def _start(self) -> None:
        self._capture: Capture | None = None  # with the pool that all recordings share
        self._recordings: dict[int, Recording] = {}
        self._inputs: torch.Tensor | None = None  # [bytes] uint8, of every size
        self._output: torch.Tensor | None = None  # [largest size, ...]
        self._used = 0  # bytes
        self._seconds = self._limits.warm_seconds  # of the next `warm`

    @property
    def recorded(self) -> tuple[int, ...]:
        """Sizes that need not be recorded any more."""
        return tuple(sorted(self._recordings))

    def run(self, inputs: Sequence[StepInput], compute: Compute) -> torch.Tensor | None:
        rows = len(inputs[0].values)
        size = self._size(rows)
        if size is None:
            return None
        recording = self._recordings.get(size) or self._record(size, inputs, compute)
        if recording is None:
            return self.run(inputs, compute)  # nothing more is recorded now: a larger one may do
        self._fill(recording.layout, inputs, size)
        recording.replay()
        return None if self._output is None else self._output[:rows]

    def warm(self, inputs: Sequence[StepInput], compute: Compute) -> bool:
        """Record the largest size first, whose memory the others share; then those for few rows; then the rest.

        The first call records as many as fit its seconds, and each further call one.
        """
        began, sizes = self._clock(), self._limits.sizes
        limit, self._seconds = self._seconds, 0.0
        order = dict.fromkeys((*sizes[-1:], *(size for size in sizes if size <= 8), *sizes[::-1]))
        left = [size for size in order if size not in self._recordings]
        for size in left:
            if self._stopped:
                break
            self._record(size, inputs, compute)
            if self._clock() - began >= limit:
                break
        complete = self._stopped or not set(sizes) - self._recordings.keys()
        if self._recordings and left and (limit or complete):
            seconds = round(self._clock() - began, 2)
            _log.info("graphs recorded", sizes=len(self._recordings), of=len(sizes), seconds=seconds)
        return not complete

    def forget(self) -> None:
        self._start()

    def _size(self, rows: int) -> int | None:
        """Return the smallest size with room for `rows`: of all, or of the recorded ones once recording has stopped."""
        sizes = self.recorded if self._stopped else self._limits.sizes
        place = bisect_left(sizes, rows)
        return sizes[place] if place < len(sizes) else None

    def _record(self, size: int, inputs: Sequence[StepInput], compute: Compute) -> Recording | None:
        """Run the function once without recording, so that lazy initialisation happens, then again while recording."""
        before = self._free_bytes()
        layout, views = self._place(size, inputs)
        self._fill(layout, inputs, size)
        try:
            hidden = compute(views)
        except torch.OutOfMemoryError:  # no reason to end the server: without a graph a step may do
            self._stop("the device has no memory for another graph")
            return None
        if self._output is None:
            self._output = hidden.new_empty(self._limits.sizes[-1], *hidden.shape[1:])
        output = self._output[:size]
        del hidden

        def step() -> None:
            output.copy_(compute(views))

        self._capture = self._capture or self._make_capture()
        try:
            recording = Recording(layout, views, self._capture(step))
        except RuntimeError as error:  # of the device: something in the model waits, or asks the host
            self._stop(f"the model cannot be recorded: {str(error).splitlines()[0]:.200}")
            return None
        self._recordings[size] = recording
        self._used += max(0, before - self._free_bytes())
        if self._used > self._limits.budget_bytes:
            self._stop(f"graphs use {self._used >> 20} MiB, and {self._limits.budget_bytes >> 20} MiB were set aside")
        return recording

    def _stop(self, reason: str) -> None:
        self._stopped = True
        _log.warning("no more graphs are recorded: other steps are launched as they are", reason=reason)

    def _place(self, size: int, inputs: Sequence[StepInput]) -> tuple[Layout, list[torch.Tensor]]:
        """Return the inputs' places in the buffer that all sizes share, which is made for the largest."""
        if self._inputs is None:
            most = _layout(inputs, self._limits.sizes[-1])
            self._inputs = torch.empty(most.size, dtype=torch.uint8, device=self._device)
        layout = _layout(inputs, size)
        return layout, layout.views(self._inputs)

    def _fill(self, layout: Layout, inputs: Sequence[StepInput], size: int) -> None:
        """Copy the inputs to the device at once, after the launches that read the ones before."""
        host = self._transfers.buffer(layout.size)
        layout.write(host, inputs)
        if self._inputs is not None:
            self._inputs[: layout.size].copy_(host, non_blocking=True)


def _layout(inputs: Sequence[StepInput], size: int) -> Layout:
    """Return the layout of inputs with their rows padded to `size`; some have one entry more than there are rows."""
    rows = len(inputs[0].values)
    shapes = [(len(values) + size - rows, *values.shape[1:]) for values, _ in inputs]
    return Layout.of([(values.dtype, shape) for (values, _), shape in zip(inputs, shapes, strict=True)])


def graph_recorder(limits: GraphLimits | None, transfers: PinnedTransfers, device: torch.device) -> Recorder | None:
    """Make the recorder of a CUDA device, or return None without limits."""
    return None if limits is None else GraphRecorder(limits, transfers, device, cuda_capture, cuda_free_bytes)


def cuda_capture() -> Capture:
    """Make a function that records into `torch.cuda.CUDAGraph`s, which share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may allocate meanwhile
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        replay: Callable[[], None] = graph.replay
        return replay

    return capture


def cuda_free_bytes() -> int:
    """Return the free bytes of the device, without those that torch has reserved."""
    return int(torch.cuda.mem_get_info()[0])
