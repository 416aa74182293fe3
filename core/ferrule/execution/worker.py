"""What runs on a device's own thread or process: load, size the cache, execute plans."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from ferrule.config import Config
from ferrule.errors import ConfigError, EngineDead
from ferrule.execution.load import Loaded, load, weigh
from ferrule.interfaces.plugins import Plugins
from ferrule.log import Log
from ferrule.nn import pack
from ferrule.runner.model_runner import ModelRunner, RunnerLimits
from ferrule.types import Admit, Chunk, ModelInfo, StepPlan, StepResult, TokenSampling

_log = Log("worker")
_DEFAULT_SLOTS = 256


class Worker:
    """One device. All methods are called on one thread, in order."""

    def __init__(self, config: Config, plugins: Plugins) -> None:
        self._config = config
        self._plugins = plugins
        self._loaded: Loaded | None = None
        self._runner: ModelRunner | None = None

    def start(self) -> ModelInfo:
        """Load the model. Raises StartupError."""
        began = time.monotonic()
        self._loaded = loaded = load(self._config, self._plugins)
        context = loaded.context
        limits = RunnerLimits(
            slots=self._config.scheduler.max_num_seqs or _DEFAULT_SLOTS,
            max_model_len=context.max_model_len,
            vocab_size=loaded.vocab_size,
            dtype=context.dtype,
            device=context.device,
        )
        sampler = self._plugins.load("sampler", self._config.model.sampler)(self._plugins)
        self._runner = runner = ModelRunner(loaded.model, loaded.attention, sampler, limits)
        info = self._describe(loaded, runner)
        if isinstance(loaded.model, nn.Module):
            pack(loaded.model)
        _log.info(
            "model loaded",
            architecture=info.architecture,
            implementation=info.implementation,
            dtype=info.dtype,
            attention=info.attention,
            parameters=info.num_parameters,
            weight_bytes=info.weight_bytes,
            seconds=round(time.monotonic() - began, 2),
        )
        for note in info.notes:
            _log.info(note)
        return info

    def _describe(self, loaded: Loaded, runner: ModelRunner) -> ModelInfo:
        context = loaded.context
        page_bytes = runner.cache.page_size * context.dtype.itemsize
        room, kept = loaded.platform.cache_bytes(self._config), runner.recurrent.num_bytes
        if kept > room:
            raise ConfigError(
                f"The states of --max-num-seqs requests need {kept / 2**30:.2f} GiB, and the cache has "
                f"{room / 2**30:.2f} GiB.",
                "Give the cache more (FERRULE_CPU_KVCACHE_SPACE on CPU, --gpu-memory-utilization elsewhere), or set "
                "--max-num-seqs to less.",
            )
        if kept and self._config.cache.enable_prefix_caching:
            loaded.notes.append("prefixes are not cached: this model keeps a state for each request")
        parameters, weight_bytes = weigh(loaded.model)
        return ModelInfo(
            architecture=loaded.architecture,
            implementation=loaded.implementation,
            vocab_size=loaded.vocab_size,
            max_model_len=context.max_model_len,
            dtype=str(context.dtype).removeprefix("torch."),
            device=loaded.caps.platform,
            attention=loaded.attention_name,
            groups=runner.cache.groups,
            page_bytes=page_bytes,
            max_blocks=(room - kept) // page_bytes if page_bytes else 2,  # without pages, no block is ever used
            num_parameters=parameters,
            weight_bytes=weight_bytes,
            notes=tuple(loaded.notes),
            depth=loaded.platform.depth(),
            prompt_border=loaded.model.prompt_border(),
        )

    def init_cache(self, num_blocks: int) -> None:
        """Allocate `num_blocks`, the null block included, and run one token, so that a first request waits for nothing.

        Raises EngineDead when that token cannot be computed.
        """
        runner = self._ready()
        runner.init_cache(num_blocks)
        runner.capture()
        greedy = TokenSampling(seed=0, max_tokens=1, temperature=0.0)
        blocks = tuple((1 + group,) for group in range(len(runner.cache.paged)))
        if num_blocks > len(blocks):
            admit = Admit(0, "warm-up", 0, (0,), 1, greedy)
            runner.execute(StepPlan(0, (Chunk(0, "warm-up", 0, 0, 1, True, (), blocks),), (admit,)))
            runner.execute(StepPlan(0, (), releases=(0,)))

    def execute(self, plan: StepPlan) -> StepResult:
        return self._ready().execute(plan)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run an administrative method. Raises ValueError for an unknown one."""
        match name:
            case "check":  # I9: no slot holds what is not its request's
                return self._ready().check(*args)
        raise ValueError(f"The worker has no method {name!r}.")

    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDead("the worker has no model")
        return self._runner
