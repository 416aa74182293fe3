"""The kit of executors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ferrule.config import Config, LoadConfig, ModelConfig, SchedulerConfig, WorkerSettings
from ferrule.config.resolve import resolve
from ferrule.env import Environment
from ferrule.errors import EngineDead, StartupError
from ferrule.interfaces.executor import Executor
from ferrule.plugin import Plugins, discover
from ferrule.types import Admit, Chunk, ModelInfo, StepPlan, TokenSampling
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown

_GREEDY = TokenSampling(seed=0, max_tokens=64, temperature=0.0)
_PROMPT = (5, 17, 200, 31, 99, 250, 8)


class ExecutorKit(Kit):
    """An executor runs plans in their order, tells of a lost worker in time, and ends when it is told to.

    Settings: `recipe`, a checkpoint of `ferrule_testkit.checkpoints`; `kill`, which makes a running executor lose a
    worker (by default its child processes are killed); `patience`, the seconds within which a loss must be told.
    """

    kind = "executor"
    recipe: str = "llama"
    kill: Callable[[Any], None] | None = None
    patience: float = 15.0

    # ------------------------------------------------------------------------------------ promises

    def test_plans_run_in_the_order_of_submission(self) -> None:
        """Give plans that are submitted ahead the results of plans submitted one by one, also while another thread asks
        for the executor's health, which is good.
        """
        with self.running() as executor, _asked(executor):
            ahead = [handle.result() for handle in [executor.submit(plan) for plan in _story()]]
            promise([result.step for result in ahead] == list(range(len(ahead))), "results carry other steps")
        with self.running() as executor:
            waited = [executor.submit(plan).result() for plan in _story()]
        promise(ahead == waited, f"steps submitted ahead give {shown(ahead)}, one by one {shown(waited)}")

    def test_handles_tell_when_a_step_is_done(self) -> None:
        """Report `done` once the result was given, and return `result` again as often as asked, in any order."""
        with self.running() as executor:
            handles = [executor.submit(plan) for plan in _story()]
            results = [handle.result() for handle in reversed(handles)]
            promise(all(handle.done() for handle in handles), "a step whose result was given is not done")
            promise([handle.result() for handle in reversed(handles)] == results, "a second result differs")

    def test_what_it_tells_of_the_model(self) -> None:
        """Describe the model in the result of `start`: positive sizes, at least one cache group or state, at least one
        step.
        """
        with self.running() as executor:
            info = self._info(executor)
            sizes = (info.vocab_size, info.max_model_len, info.max_blocks, info.num_parameters, info.depth)
            promise(all(size > 0 for size in sizes), f"sizes that cannot be: {shown(info)}")
            promise(bool(info.groups) and bool(info.architecture) and bool(info.dtype), f"too little is told: {info}")

    def test_a_failed_step_is_fatal_and_told(self) -> None:
        """Raise from the handle of a plan that cannot run; be unhealthy afterwards, and run nothing more."""
        with self.running() as executor:
            handle = executor.submit(_impossible())
            self._raises(handle.result, Exception, "a plan without a block has a result")
            self._unhealthy(executor)
            self._raises(
                lambda: executor.submit(StepPlan(step=1, chunks=())).result(), EngineDead, "a plan runs after a fault"
            )

    def test_a_lost_worker_is_told_in_time(self) -> None:
        """Notice a killed worker: no result is waited for in vain, and `check_health` raises EngineDead in seconds."""
        before = _children()
        with self.running() as executor:
            executor.check_health()
            children = _children() - before
            if self.kill is None and not children:
                does_not_apply("its worker is this process, and dies with it")
            if self.kill is not None:
                self.kill(executor)
            else:
                for child in children:
                    os.kill(child, signal.SIGKILL)
            self._in_time(lambda: self._outcome(executor))
            self._unhealthy(executor)
            self._raises(lambda: executor.submit(_story()[0]).result(), EngineDead, "a plan runs without the worker")

    def test_shutdown_is_idempotent_and_bounded(self) -> None:
        """Return from `shutdown` within seconds, also twice, unstarted, or after a fault, and leave no process or
        thread.
        """
        before = (_children(), threading.active_count())
        unstarted: Executor = self.new()
        self._in_time(unstarted.shutdown)
        with self.running() as executor:
            executor.submit(_impossible())
            for _ in range(2):
                self._in_time(executor.shutdown)
            self._raises(
                lambda: executor.submit(StepPlan(step=0, chunks=())).result(), EngineDead, "a plan runs after shutdown"
            )
            self._unhealthy(executor)
        deadline = time.monotonic() + self.patience
        while (left := (_children(), threading.active_count())) > before and time.monotonic() < deadline:
            time.sleep(0.02)
        promise(left <= before, f"processes or threads are left: {left[0]}, {left[1]} threads")

    def test_a_start_that_fails_leaves_nothing(self) -> None:
        """Raise StartupError for a model that cannot be loaded, and leave no process or thread."""
        children = _children()
        executor: Executor = self.new()
        config = self.config()
        config = replace(config, model=replace(config.model, model=str(self.folder() / "none")))
        self._raises(
            lambda: executor.start(config, self.plugins()), StartupError, "a model that is not there is loaded"
        )
        self._in_time(executor.shutdown)
        promise(_children() <= children, "processes are left of a start that failed")

    def test_a_check_leaves_nothing(self) -> None:
        """Raise nothing from `check` of a model that can be loaded, and leave no process or thread."""
        before = (_children(), threading.active_count())
        executor: Executor = self.plugin()
        executor.check(self.config(), self.plugins())
        self._in_time(executor.shutdown)
        left = (_children(), threading.active_count())
        promise(left <= before, f"processes or threads are left: {left[0]}, {left[1]} threads")

    def test_before_the_start_nothing_runs(self) -> None:
        """Raise EngineDead for a plan before `start`, and do not hang."""
        executor: Executor = self.new()
        self._raises(
            lambda: self._in_time(lambda: executor.submit(StepPlan(step=0, chunks=()))),
            EngineDead,
            "a plan runs unstarted",
        )

    def test_administrative_calls(self) -> None:
        """Raise ValueError that names an unknown method, and keep running steps afterwards."""
        with self.running() as executor:
            self._raises(lambda: executor.call("no_such_method"), ValueError, "an unknown method is called")
            executor.check_health()
            promise(executor.submit(StepPlan(step=0, chunks=())).result().rows == (), "an empty plan has rows")

    # ------------------------------------------------------------------------------------ parts

    def config(self) -> WorkerSettings:
        from ferrule_testkit.kits.model_run import recipe_folder

        config = Config(
            model=ModelConfig(model=str(recipe_folder(self.recipe)), dtype="float32"),
            load=LoadConfig(use_tqdm_on_load=False),
            scheduler=SchedulerConfig(max_num_seqs=2),
            env=Environment(cpu_kvcache_space=0.01),
        )
        return WorkerSettings.of(resolve(config))

    def plugins(self) -> Plugins:
        return discover()

    @contextmanager
    def running(self) -> Iterator[Executor]:
        executor: Executor = self.new()
        try:
            self._started = executor.start(self.config(), self.plugins())
            executor.init_cache(20)
            yield executor
        finally:
            executor.shutdown()

    def _info(self, executor: Executor) -> ModelInfo:
        return self._started

    def _outcome(self, executor: Executor) -> str:
        """Return what becomes of a plan just after the loss: it may run, fail or be refused, but it must not hang."""
        try:
            executor.submit(_story()[0]).result()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it ran"

    def _unhealthy(self, executor: Executor) -> None:
        """Wait until `check_health` raises EngineDead."""
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            try:
                executor.check_health()
            except EngineDead as error:
                promise(bool(str(error)), "EngineDead comes without a word")
                return
            time.sleep(0.02)
        promise(False, f"check_health finds nothing wrong after {self.patience:.0f} s")

    def _in_time(self, function: Callable[[], Any]) -> Any:
        """Call on another thread; a promise is broken when it does not return. Raises what the function raises."""
        ended: list[Any] = []

        def run() -> None:
            try:
                ended.append((function(), None))
            except BaseException as error:
                ended.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.patience)
        promise(bool(ended), f"a call does not return within {self.patience:.0f} s")
        if ended[0][1] is not None:
            raise ended[0][1]
        return ended[0][0]

    def _raises(self, function: Callable[[], Any], kind: type[Exception], otherwise: str) -> None:
        try:
            function()
        except kind:
            return
        promise(False, otherwise)


@contextmanager
def _asked(executor: Executor) -> Iterator[None]:
    """Ask for the health of an executor on another thread, again and again, as a server does."""
    faults: list[Exception] = []
    ended = threading.Event()

    def ask() -> None:
        while not (faults or ended.wait(0.001)):
            try:
                executor.check_health()
            except Exception as error:
                faults.append(error)

    thread = threading.Thread(target=ask, name="health")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    promise(not faults, f"check_health raises while plans run: {shown(faults)}")


def _story() -> list[StepPlan]:
    """Return plans for a prompt, and then for one token after another that only the device has seen."""
    admit = Admit(slot=0, id="a", epoch=0, known_ids=_PROMPT, num_prompt=len(_PROMPT), work=_GREEDY)
    plans = [
        StepPlan(
            step=0,
            chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=len(_PROMPT), ends="sample", new_blocks=((3, 4),)),),
            admits=(admit,),
        )
    ]
    plans += [
        StepPlan(step=n, chunks=(Chunk(slot=0, id="a", epoch=0, start=len(_PROMPT) + n - 1, count=1, ends="sample"),))
        for n in range(1, 6)
    ]
    return [*plans, StepPlan(step=6, chunks=(), releases=(0,))]


def _impossible() -> StepPlan:
    """Return a plan with a request that has no block for its token."""
    return StepPlan(
        step=0,
        chunks=(Chunk(slot=0, id="a", epoch=0, start=0, count=1, ends="sample", new_blocks=((),)),),
        admits=(Admit(slot=0, id="a", epoch=0, known_ids=(1,), num_prompt=1, work=_GREEDY),),
    )


def _children() -> set[int]:
    """Return the ids of all processes below this one. Works on Linux only; elsewhere the set is empty."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry.parent.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
