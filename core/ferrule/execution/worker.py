"""A worker: it loads a model, sizes its cache, executes plans, and gives memory back, on a device's own thread.

The worker is part of the core, because it chooses, loads, measures memory, survives a shortage of it and gives it back
in the same way wherever it runs. An executor only says in which thread, process or machine that is: the built-in `uni`
is a few lines around a `WorkerThread`, and `tests/downstream/acme_pipe` runs the same worker in a child over two pipes.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ferrule.assembly.calibration import calibrate
from ferrule.assembly.first_adapters import read_first
from ferrule.assembly.limits import cache_bytes, sized
from ferrule.assembly.memory import device_tensors
from ferrule.assembly.model import Loaded, check_model, load_model
from ferrule.assembly.self_check import check_finite
from ferrule.assembly.speculator import SpeculatorMaker
from ferrule.assembly.vocabulary import open_backend, open_tokenizer
from ferrule.config import DeviceSettings, WorkerSettings
from ferrule.config.resolve import detailed_traces, step_tokens
from ferrule.errors import ConfigError, EngineDead, RequestError
from ferrule.execution.description import describe
from ferrule.execution.host_copy import HostCopy
from ferrule.execution.shortage import Shortage
from ferrule.execution.timing import open_runner
from ferrule.interfaces.adapters import AdapterBank
from ferrule.interfaces.executor import Step
from ferrule.interfaces.model import Generates, Model
from ferrule.interfaces.platform import Platform
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.sampler import LogprobsMode, Sampler, TypicalAcceptance
from ferrule.interfaces.speculator import Speculator
from ferrule.log import Log
from ferrule.runner.cache import StateStore, cache_of
from ferrule.runner.grammars import Grammars
from ferrule.runner.model_runner import ModelRunner, RunnerParts
from ferrule.runner.state import RunnerLimits
from ferrule.slow_start import waiting
from ferrule.types import (
    AdapterLoad,
    Admit,
    Chunk,
    CompiledGrammar,
    ModelInfo,
    Need,
    Pooling,
    StepPlan,
    StepResult,
    TokenSampling,
)

_LOADS = 16  # adapters that are loaded at once, if the bank can
_log = Log("worker")


class Worker:
    """One device. All methods are called on one thread, in order. `calls` are the methods that `call` may name."""

    calls = frozenset({"check", "release", "restore"})

    def __init__(self, config: WorkerSettings, plugins: Plugins, adapters: AdapterBank | None = None) -> None:
        """Set up a worker without a model. `adapters` is the bank that the model's layers are to have parts of."""
        self.config = config
        self._plugins = plugins
        self._adapters = adapters
        # Without a load no thread; one of the processor's cores is enough for each.
        self._loader = ThreadPoolExecutor(_LOADS, "ferrule-adapter-load", torch.set_num_threads, (1,))
        self._slot_loads: dict[int, Future[None]] = {}  # the last one for each slot
        self._runner: ModelRunner | None = None
        self.grammars: Grammars  # its `expect` may be called from any thread, and so may our `prepare`
        self._shortage: Shortage
        self.platform: Platform
        self.depth = 1  # steps in flight that pay off
        self._reload: Callable[[], Model]
        self._speculators: SpeculatorMaker
        self._tokenizer = cache(partial(open_tokenizer, config, plugins, Path(config.model.tokenizer)))
        self._num_blocks = self._num_snapshots = self._vocab_size = 0
        self._asleep: tuple[Model, Speculator | None, HostCopy] | None = None  # models whose weights the host keeps
        self._missing = {"kv_cache"}  # parts that have no memory now
        self._settled = False  # the step of the warm-up was repeated
        self._own_memory = False  # the device does not compute in the host's memory

    @property
    def model_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDead("the worker has no model")
        return self._runner

    def check_start(self) -> ModelInfo:
        """Choose all that `start` chooses, and size the cache as after it. Raises StartupError. Only adapters are
        loaded, into the host's memory.
        """
        sampler: type[Sampler] = self._plugins.load("sampler", self.config.model.sampler)
        loaded = check_model(self.config, self._plugins, self._adapters)
        limits = _limits(self.config, loaded, sampler)
        speculators = SpeculatorMaker.of(
            self.config, self._plugins, loaded, limits.slots, self._tokenizer, checked=True
        )
        speculator = speculators.make(loaded.model)
        drafts = {} if speculator is None else speculator.cache_specs()
        layers, store = cache_of(loaded.model, loaded.attention, limits, drafts)
        step_tokens(self.config.scheduler, loaded.context.max_model_len, loaded.model.splits_prompts)
        info, num_blocks = sized(self.config, describe(self.config, loaded, speculator, layers, store))
        snapshots = info.max_snapshots * info.state_bytes
        loaded.platform.memory().check_cache(num_blocks * info.page_bytes + store.num_bytes + snapshots)
        if loaded.context.adapters is not None:
            read_first(self.config.lora, loaded.context.adapters.read)
        return info

    def start(self) -> ModelInfo:
        """Load the model. Raises StartupError."""
        began = time.monotonic()
        sampler = self._plugins.make("sampler", self.config.model.sampler, self._plugins)
        loaded = load_model(self.config, self._plugins, self._adapters)
        self.platform, self._reload = loaded.platform, loaded.reload
        self._adapters = loaded.context.adapters
        self._own_memory = "host_memory" not in loaded.caps.features
        context = loaded.context
        limits = _limits(self.config, loaded, sampler)
        if loaded.cache_scales.calculated and loaded.cache_scales.used:
            with self.platform.memory().guard("load"):
                tokens = step_tokens(self.config.scheduler, limits.max_model_len)
                notes = calibrate(loaded, limits, sampler, tokens)
            loaded = dataclasses.replace(loaded, info=replace(loaded.info, notes=loaded.info.notes + notes))
        execution = self.platform.execution()
        self.depth = execution.depth()
        execution.optimise(loaded.model, DeviceSettings.of(self.config))
        self._speculators = SpeculatorMaker.of(self.config, self._plugins, loaded, limits.slots, self._tokenizer)
        speculator = self._speculators.make(loaded.model)
        backend = partial(open_backend, self.config, self._plugins, self._tokenizer, limits.vocab_size)
        self.grammars = Grammars(backend, self._tokenizer)
        self._vocab_size = limits.vocab_size
        parts = RunnerParts(
            model=loaded.model,
            attention=loaded.attention,
            sampler=sampler,
            limits=limits,
            transfers=execution.transfers(),
            recorder=execution.recorder(DeviceSettings.of(self.config)),
            tokenizer=self._tokenizer,
            grammars=self.grammars,
            speculator=speculator,
            draft_recorder=partial(execution.recorder, DeviceSettings.of(self.config)),
            adapters=self._adapters,
            kernels=context.kernels,
            zeros=self.platform.memory().zeros,
        )
        self._runner = runner = open_runner(parts, detailed_traces(self.config.observability))
        self._shortage = Shortage(runner, self.platform.memory())
        tokens = step_tokens(self.config.scheduler, limits.max_model_len, loaded.model.splits_prompts)
        self.platform.memory().rehearse(_rehearsal(runner, limits, tokens, self.config.speculative.num_tokens))
        info = describe(self.config, loaded, speculator, runner.cache, runner.recurrent)
        self._num_snapshots = info.max_snapshots
        shown = "architecture", "implementation", "dtype", "quantization", "attention", "num_parameters", "weight_bytes"
        seconds = round(time.monotonic() - began, 2)
        _log.info("model loaded", **{name: getattr(info, name) for name in shown}, seconds=seconds)
        for note in info.notes:
            _log.info(note)
        return info

    def init_cache(self, num_blocks: int) -> None:
        """Allocate `num_blocks`, the null block included. Raises EngineDead when then not one token can be computed."""
        self._num_blocks = num_blocks
        with self.platform.memory().guard("cache"):
            self.restore("kv_cache")

    def settle(self) -> bool:
        """Do a part of what the start has put off, while no request has come; return whether there is more.

        First the step of the warm-up is repeated: a recorder may record a step when it sees it again. Then more sizes
        are recorded, where the recorder does so by itself.
        """
        runner = self.model_runner
        if not self._settled and self._num_blocks > len(runner.cache.paged):
            _fails(
                runner, self.execute, self.config.speculative.num_tokens, 1, 0
            )  # `execute` survives a shortage of memory
        elif self._settled and not self._missing:
            with self.platform.memory().guard("step"):
                return self.model_runner.capture()
        self._settled = True
        return True

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step from its beginning to its end."""
        return self.end(self.begin(plan))

    def begin(self, plan: StepPlan) -> Step:
        """Queue a step on the device and return it; pass it to `end`."""
        return self._shortage.begin(plan)

    def end(self, step: Step) -> StepResult:
        """Wait for a step's result. What a device was told to do may fail only here."""
        with self.platform.memory().guard("step"):
            return step.result()

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run an administrative method. Raises ValueError for an unknown one."""
        if name not in self.calls:
            raise ValueError(f"The worker has no method {name!r}.")
        return getattr(self, name)(*args)

    def prepare(self, need: Need) -> Future[None]:
        """Load what a request needs, without waiting for it. From any thread; no step waits for it either."""
        if isinstance(need, CompiledGrammar):
            return self.grammars.prepare(need)
        if self._adapters is None:
            raise RequestError("This server has no adapters.", "model")
        before = self._slot_loads.get(need.slot)
        load = self._loader.submit(_load_adapter, self._adapters, need, before)
        if need.slot:
            self._slot_loads[need.slot] = load
        return load

    def close(self, failed: bool = False) -> None:
        """End the threads of constraints and adapters, and give a device's memory back.

        Not if it has `failed`, or is still in a step: whoever waits for it then may wait for ever. The host's memory
        goes with the last reference to it. Nothing is called afterwards.
        """
        if self._runner is None:
            return
        self.grammars.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        if self._own_memory and not failed:
            del self._shortage
            self._runner = self._asleep = None
            gc.collect()  # the parts of a model may refer to each other
            self.platform.memory().trim()

    # ------------------------------------------------------------------------------------ administration

    def check(self) -> None:
        """Raise an error if a slot holds what is not its request's (I9)."""
        self.model_runner.check()

    def release(self, parts: Sequence[str], level: int) -> None:
        """Give the memory of weights and cache back to the system; every request is forgotten.

        At level 1 the host keeps a copy of the weights of a device that has memory of its own. On a CPU there is no
        other memory, and they are read again at either level.
        """
        if "weights" in parts:
            with self._weights_change():
                if level == 1 and "weights" not in self._missing and self._own_memory:
                    model, speculator = self.model_runner.model, self.model_runner.speculator
                    models = [model, *(() if speculator is None else speculator.modules())]
                    tensors = [tensor for each in models for tensor in device_tensors(each, self.platform.device())]
                    self._asleep = model, speculator, HostCopy(tensors)
                elif level > 1:
                    self._asleep = None
                self.model_runner.use(None)
        self._missing.update(parts)
        if "kv_cache" in parts:
            self.model_runner.release_cache()
        gc.collect()  # the parts of a plugin's model may refer to each other
        self.platform.memory().trim()

    def restore(self, part: str) -> None:
        """Bring back the weights, from the host's copy or else from the checkpoint as it is now, or an empty cache.

        Raises CheckpointError, ConfigError for memory that is not there, EngineDead.
        """
        with self.platform.memory().guard("load" if part == "weights" else "cache"):
            if part == "weights":
                with self._weights_change() as adapters:
                    others = self._asleep is None
                    self.model_runner.use(*self._weights())
                    if others and adapters is not None:
                        adapters.follow_model()
            else:
                self._open_cache()
            self._missing.discard(part)
            if not self._missing:
                self._warm_up(self.model_runner)

    @contextmanager
    def _weights_change(self) -> Iterator[AdapterBank | None]:
        """Keep loads of adapters from reading the model's weights."""
        with nullcontext() if self._adapters is None else self._adapters.lock:
            yield self._adapters

    def _open_cache(self) -> None:
        """Allocate the cache; what of it was written to is given back when there is not memory for all."""
        self.model_runner.init_cache(self._num_blocks, self._num_snapshots)
        try:
            self.platform.memory().commit(self.model_runner.cache_tensors)
        except BaseException:
            self.model_runner.release_cache()
            raise

    def _weights(self) -> tuple[Model, Speculator | None]:
        """Return the sleeping model and its speculator, awake; if none sleeps, load them again."""
        if self._asleep is None:
            model = self._reload()
            self.platform.execution().optimise(model, DeviceSettings.of(self.config))
            return model, self._speculators.make(model)
        model, speculator, copy = self._asleep
        copy.restore()
        self._asleep = None
        return model, speculator

    def _warm_up(self, runner: ModelRunner) -> None:
        """Run one token, so that a first request waits for nothing; then give back what loading needed.

        A device of its own runs two: such a step is launched, not recorded, and what compiles kernels for it is a
        second or more.
        """
        count = 2 if self._own_memory else 1
        with waiting("the first step of the model"):
            runner.capture()
            fails = partial(_fails, runner, runner.execute, self.config.speculative.num_tokens, count)
            if self._num_blocks > len(runner.cache.paged) and fails(0):
                check_finite(runner.model, self._vocab_size, fails)
        self.platform.memory().trim()


def _load_adapter(bank: AdapterBank, need: AdapterLoad, before: Future[None] | None) -> None:
    """Read an adapter, or load it into a slot once the load `before` it has ended there."""
    if before is not None:
        wait((before,))
    with nullcontext() if bank.concurrent else bank.lock:
        if need.slot:
            bank.load(need.slot, need.adapter)
        else:
            bank.read(need.adapter)


def _limits(config: WorkerSettings, loaded: Loaded, sampler: Sampler | type[Sampler]) -> RunnerLimits:
    """Return the limits of the runner. Raises ConfigError for what the sampler does not know."""
    context, mode = loaded.context, LogprobsMode(config.model.logprobs_mode)
    if mode not in sampler.logprobs_modes:
        known = ", ".join(sorted(each.value for each in sampler.logprobs_modes)) or "none"
        raise ConfigError(f"--logprobs-mode {mode.value}: the sampler {config.model.sampler} knows {known}.")
    typical = config.speculative.typical
    if typical is not None and not sampler.accepts_typical:
        raise ConfigError(
            f"--speculative-config.acceptance_method: the sampler {config.model.sampler} does not know "
            f"{config.speculative.acceptance_method}."
        )
    return RunnerLimits(
        slots=_num_slots(config, loaded),
        max_model_len=context.max_model_len,
        vocab_size=loaded.info.vocab_size,
        dtype=context.dtype,
        device=context.device,
        host_memory="host_memory" in loaded.caps.features,
        block_size=context.block_size,
        cache_type=loaded.cache_type,
        logprobs_mode=mode,
        typical=None if typical is None else TypicalAcceptance(threshold=typical[0], alpha=typical[1]),
    )


def _num_slots(config: WorkerSettings, loaded: Loaded) -> int:
    """Return how many requests may run at a time: as many as the option says.

    Where the option was not given, a model's states get half of the cache's memory, or all of it if nothing else is
    cached.
    """
    scheduler, context = config.scheduler, loaded.context
    each = StateStore(loaded.model.state_specs(), 1, context.dtype, context.device).request_bytes
    if not each or not scheduler.fits_states:
        return scheduler.max_num_seqs
    others = bool(loaded.model.cache_specs()) or config.cache.enable_prefix_caching
    room = cache_bytes(config, loaded.platform.memory()) // (2 if others else 1)
    return min(scheduler.max_num_seqs, max(1, room // each))


def _rehearsal(runner: ModelRunner, limits: RunnerLimits, tokens: int, guesses: int) -> Callable[[], None]:
    """Return a function that runs the largest step: as many tokens and as many rows as possible, with up to so many
    guesses each, whose contexts all lie in one block.
    """
    rows = min(limits.slots, tokens)
    prompts = [(0,) * min(limits.max_model_len, tokens // rows + (row < tokens % rows)) for row in range(rows)]

    def step() -> None:
        runner.init_cache(1 + len(runner.cache.paged))
        runner.execute(_trial(runner, prompts, guesses, guessed=True))
        runner.release_cache()

    return step


def _fails(
    runner: ModelRunner, execute: Callable[[StepPlan], StepResult], guesses: int, count: int, token: int
) -> bool:
    """Return whether the model computes nothing finite for a prompt of `count` times this token."""
    result = execute(_trial(runner, [(token,) * count], guesses))
    execute(StepPlan(step=0, chunks=(), releases=(0,)))
    return bool(result.rows[0].error)


def _trial(runner: ModelRunner, prompts: Sequence[tuple[int, ...]], guesses: int, guessed: bool = False) -> StepPlan:
    """Make a step that computes prompts, each in a slot of its own and all of them in one block of each group.

    It ends with greedy samples, or with vectors of a model that gives nothing else. So many `guesses` are asked for;
    where prompts are `guessed`, as many of their last ids, less than half, are computed as guesses.
    """
    generates = isinstance(runner.model, Generates)
    work = TokenSampling(seed=0, max_tokens=1, temperature=0.0) if generates else Pooling()
    chunks, admits = [], []
    for slot, ids in enumerate(prompts):
        id, count = f"trial-{slot}", len(ids)
        drafts = min(guesses, (count - 1) // 2) if guessed else 0
        blocks = tuple((1 + n,) * -(-count // group.block_size) for n, group in enumerate(runner.cache.paged))
        chunk = Chunk(slot=slot, id=id, epoch=0, start=0, count=count, ends=work.ends, new_blocks=blocks)
        chunks.append(replace(chunk, new_ids=ids[count - drafts :], drafts=drafts, wanted=guesses))
        known = ids[: count - drafts]
        admits.append(Admit(slot=slot, id=id, epoch=0, known_ids=known, num_prompt=len(known), work=work))
    return StepPlan(step=0, chunks=tuple(chunks), admits=tuple(admits))
