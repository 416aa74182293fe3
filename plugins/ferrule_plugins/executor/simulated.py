"""An executor without a device: tokens are made up, and a step takes a given time.

It leaves only the host to measure: ``ferrule serve MODEL --distributed-executor-backend simulated`` serves any
checkpoint's configuration and tokenizer, without weights, and without torch. ``--model-loader-extra-config`` may have
`step_seconds`, and `token_seconds` for each token of a step; both are 0 by default.
"""

from __future__ import annotations

import time
from typing import Any

from ferrule import checkpoint
from ferrule.config import WorkerSettings
from ferrule.errors import ConfigError, EngineDead
from ferrule.interfaces.executor import Executor, Step
from ferrule.interfaces.plugins import Plugins
from ferrule.log import Log
from ferrule.types import (
    Admit,
    CacheGroup,
    Chunk,
    ModelInfo,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenSampling,
)

_POOL_TOKENS = 1 << 22  # the cache's claimed room in tokens, or one longest request where that is more
_OPTIONS = ("step_seconds", "token_seconds")
_CALLS = frozenset({"check", "release", "restore"})  # there is no memory to check or release
_log = Log("worker")


class SimulatedStep(Step):
    """A step that is done when its time has passed."""

    def __init__(self, result: StepResult, due: float) -> None:
        self._result = result
        self._due = due

    def done(self) -> bool:
        return time.monotonic() >= self._due

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._due - time.monotonic()))
        return self._result


class FailedStep(Step):
    """A step that the device did not survive."""

    def __init__(self, error: EngineDead) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        raise self._error


class SimulatedExecutor(Executor):
    """An executor without a model. A token is a function of its request's seed and its position, so a recomputed
    request repeats itself.
    """

    runs_model = False

    def __init__(self) -> None:
        self._live: dict[int, tuple[Admit, TokenSampling]] = {}  # by slot
        self._room: dict[int, int] = {}  # tokens that a slot's tables have blocks for
        self._info: ModelInfo | None = None
        self._dead: EngineDead | None = EngineDead("the executor is not started")
        self._seconds = (0.0, 0.0)  # of a step, and of each token in it
        self._free_at = 0.0  # when the last step submitted is done

    def start(self, config: WorkerSettings, plugins: Plugins) -> ModelInfo:
        values = checkpoint.configured(config.model, plugins, config.model.model)
        self._seconds = _seconds(config.load.model_loader_extra_config)
        length = config.model.max_model_len or checkpoint.max_length(values)
        size = config.cache.block_size
        self._info = ModelInfo(
            architecture=checkpoint.architectures(values)[0],
            implementation="simulated: tokens are made up",
            vocab_size=values["vocab_size"],
            max_model_len=length,
            dtype="none",
            device="none",
            attention="none",
            groups=(CacheGroup("full", size),),
            page_bytes=1,
            max_blocks=max(_POOL_TOKENS, length) // size + 2,
            num_parameters=values["vocab_size"] * values["hidden_size"],  # those of the embedding
            depth=2,
        )
        self._dead = None
        _log.warning("the executor is simulated: no model is loaded, and the tokens mean nothing")
        return self._info

    def init_cache(self, num_blocks: int) -> None:
        self.check_health()

    def submit(self, plan: StepPlan) -> Step:
        self.check_health()
        for slot in plan.releases:
            del self._live[slot], self._room[slot]
        for admit in plan.admits:
            self._live[admit.slot], self._room[admit.slot] = (admit, _sampling(admit)), 0
        try:
            rows = tuple([self._row(chunk) for chunk in plan.chunks])
        except EngineDead as error:
            self._dead = error
            return FailedStep(error)
        step, token = self._seconds
        if step or token:
            self._free_at = max(self._free_at, time.monotonic()) + step + token * plan.num_tokens
        return SimulatedStep(StepResult(plan.step, rows), self._free_at)

    def _row(self, chunk: Chunk) -> RowResult:
        """Return the result of one row. Raises EngineDead for positions without a block."""
        end = chunk.start + chunk.count
        if chunk.new_blocks and self._info is not None:
            self._room[chunk.slot] += len(chunk.new_blocks[0]) * self._info.groups[0].block_size
        if end > self._room[chunk.slot]:
            raise EngineDead(f"slot {chunk.slot} has no block for position {end - 1}")
        admit, sampling = self._live[chunk.slot]
        ids = (self._token(sampling, end),) if chunk.ends == "sample" else ()
        prompt: tuple[TokenLogprobs, ...] = ()
        if sampling.prompt_logprobs is not None:
            last = min(end + 1, admit.num_prompt)
            known = admit.known_ids[chunk.start + 1 : last]
            prompt = tuple([_logprob(token, sampling.prompt_logprobs) for token in known])
        logprobs = () if sampling.logprobs is None else tuple([_logprob(token, sampling.logprobs) for token in ids])
        return RowResult(id=chunk.id, epoch=chunk.epoch, token_ids=ids, logprobs=logprobs, prompt_logprobs=prompt)

    def _token(self, sampling: TokenSampling, position: int) -> int:
        if self._info is None:
            raise EngineDead("the executor is not started")
        return (sampling.seed + position * 7919) % self._info.vocab_size

    def call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        self.check_health()
        if name not in _CALLS:
            raise ValueError(f"The simulated executor has no method {name!r}.")
        if name == "release":
            self._live.clear()
            self._room.clear()
        return None

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead

    def shutdown(self) -> None:
        self._dead = EngineDead("the executor has stopped")


def _seconds(options: dict[str, Any]) -> tuple[float, float]:
    """Return the two times in the options, in seconds. Raises ConfigError."""
    unknown = options.keys() - set(_OPTIONS)
    values = [options.get(name, 0.0) for name in _OPTIONS]
    if unknown or not all(isinstance(value, int | float) and 0 <= value <= 60 for value in values):
        raise ConfigError(
            f"--model-loader-extra-config: the simulated executor takes {' and '.join(_OPTIONS)}, from 0 to 60."
        )
    return float(values[0]), float(values[1])


def _logprob(token: int, count: int) -> TokenLogprobs:
    """Make up log-probabilities for a token: it is the most likely one, and the ids beside it follow."""
    return TokenLogprobs(token, -1.0, 1, tuple([(token + rank, -1.0 - rank) for rank in range(max(count, 0))]))


def _sampling(admit: Admit) -> TokenSampling:
    """Return the sampling parameters of a request. Raises EngineDead for a request to be pooled, which the gate never
    admits.
    """
    if not isinstance(admit.work, TokenSampling):
        raise EngineDead(f"request {admit.id} is to be pooled, and there is no model that does")
    return admit.work
