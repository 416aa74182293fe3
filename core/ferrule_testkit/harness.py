"""A model under the whole engine but without processes and HTTP: load, schedule, compute, sample, in this process.

with Harness(folder, dtype="float32") as harness:
    engine = harness.engine(num_blocks=64, max_num_batched_tokens=16)
    outputs = engine.run([[5, 6, 7], [8, 9]], max_tokens=12)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from ferrule.assembly.limits import scheduler_limits
from ferrule.config import CacheConfig, Config, LoadConfig, ModelConfig, SpeculativeConfig, WorkerSettings
from ferrule.config.resolve import resolve, with_speculator
from ferrule.engine.loop import EngineLoop
from ferrule.env import Environment
from ferrule.interfaces.executor import Executor
from ferrule.interfaces.scheduler import Scheduler, SchedulerLimits
from ferrule.plugin import Plugins
from ferrule.types import (
    Adapter,
    CompiledGrammar,
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelInfo,
    RequestDelta,
    TokenLogprobs,
    TokenSampling,
)
from ferrule.wire.messages import Deltas, FromEngine, Submit, ToEngine
from ferrule_testkit.installed import installed_plugins

_CACHE_GIB = 0.0625  # little, because saved states take all that there is, and all of it is written to
_CLIENT = b"harness"


@dataclass
class Output:
    """The output of one request. `cached` counts prompt tokens that came from the prefix cache."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    invalid: bool = False
    cached: int = 0
    num_preemptions: int = 0

    def add(self, delta: RequestDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.cached = max(self.cached, delta.cached)
        self.num_preemptions = max(self.num_preemptions, delta.num_preemptions)
        self.finish, self.error, self.invalid = delta.finish, delta.error, delta.invalid


class Harness:
    """One model in memory, and any number of engines over it, one after the other."""

    def __init__(
        self,
        folder: Path | str,
        *,
        block_size: int = 4,
        kv_cache_dtype: str = "auto",
        sections: Mapping[str, Any] | None = None,
        plugins: Plugins | None = None,
        speculative: Mapping[str, Any] | None = None,
        executor: str | Executor = "uni",
        **model: Any,
    ) -> None:
        """Load a model. `model` are fields of `ModelConfig`; `plugins` defaults to all that are installed; `executor`
        is an executor that was not started, or the name of one. `speculative` is --speculative-config, with a method
        and a folder; `sections` are other sections of the configuration, by name. Raises StartupError.
        """
        resolved = resolve(
            Config(
                model=ModelConfig(model=str(folder), **model),
                cache=CacheConfig(block_size=block_size, kv_cache_dtype=kv_cache_dtype),
                speculative=SpeculativeConfig(speculative_config=dict(speculative or {})),
                env=Environment(cpu_kvcache_space=_CACHE_GIB),
                **{"load": LoadConfig(use_tqdm_on_load=False), **(sections or {})},
            )
        )
        self.plugins: Plugins = installed_plugins() if plugins is None else plugins
        self.config = with_speculator(resolved, self.plugins)
        made = self.plugins.make("executor", executor) if isinstance(executor, str) else executor
        self.executor: Executor = made
        self.info: ModelInfo = self.executor.start(WorkerSettings.of(self.config), self.plugins)

    def engine(self, *, num_blocks: int = 256, depth: int = 1, policy: str = "fcfs", **limits: Any) -> Engine:
        """Return a fresh engine with an empty cache. `limits` are fields of `SchedulerLimits`."""
        self.executor.init_cache(num_blocks)
        guesses = scheduler_limits(self.config, self.info, num_blocks).guesses
        settings = SchedulerLimits(
            groups=self.info.groups,
            num_blocks=num_blocks,
            max_num_seqs=limits.pop("max_num_seqs", 8),
            max_num_batched_tokens=limits.pop("max_num_batched_tokens", 512),
            max_model_len=self.info.max_model_len,
            depth=depth,
            prompt_border=self.info.prompt_border,
            num_snapshots=self.info.max_snapshots,
            adapter_slots=self.info.adapter_slots,
            **{"guesses": guesses, **limits},
        )
        scheduler = self.plugins.make(
            "scheduler", "default", settings, self.plugins.make("policy", policy), self.plugins
        )
        return Engine(scheduler, self.executor)

    def close(self) -> None:
        self.executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Engine:
    """A scheduler and a loop over the harness's executor. The prefix cache lives as long as the engine."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self._inbox: list[tuple[bytes, ToEngine]] = []
        self._outputs: dict[str, Output] = {}
        self._numbers = itertools.count()
        self._loop = EngineLoop(scheduler, executor, self, time.monotonic, debug=True)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 12,
        grammars: Sequence[CompiledGrammar | None] = (),
        adapters: Sequence[str | Adapter | None] = (),
        salts: Sequence[str | None] = (),
        seeds: Sequence[int | None] = (),
        **sampling: Any,
    ) -> list[Output]:
        """Submit all prompts at once and step until all have ended. Greedy unless `sampling` (TokenSampling) differs.

        `grammars` are the constraints of the first prompts, `adapters` their adapters, or the names of such, `salts`
        their cache salts, `seeds` their seeds. Checks the scheduler's invariants afterwards, and that no block is in
        use.
        """
        settings = TokenSampling(**{"seed": 0, "temperature": 0.0, "logprobs": 0, "max_tokens": max_tokens} | sampling)
        requests = [
            EngineRequest(
                id=f"request-{next(self._numbers)}",
                prompt_ids=tuple(prompt),
                work=settings if seed is None else replace(settings, seed=seed),
                cache_salt=salt,
                grammar=grammar,
                adapter=Adapter(name=adapter) if isinstance(adapter, str) else adapter,
            )
            for prompt, grammar, adapter, salt, seed in itertools.zip_longest(prompts, grammars, adapters, salts, seeds)
        ]
        outputs = [self._outputs.setdefault(request.id, Output()) for request in requests]
        self._inbox = [(_CLIENT, Submit(request)) for request in requests]
        while any(output.finish is None for output in outputs):
            self._loop.step()
        self.scheduler.check()
        if self.stats.blocks_used:
            raise AssertionError(f"{self.stats.blocks_used} blocks are in use though nothing runs")
        return outputs

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def receive(self, timeout: float) -> list[tuple[bytes, ToEngine]]:
        arrived, self._inbox = self._inbox, []
        return arrived

    def send(self, client: bytes, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                self._outputs[delta.id].add(delta)
