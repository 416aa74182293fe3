"""`EngineCalls`: what `LLM` and its `llm_engine` have in common. Calls block, and are thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.llm.backend import Backend
from ferrule.llm.lora import LoRARequest
from ferrule.llm.metrics import Metric
from ferrule.types import ModelInfo


class EngineCalls:
    """The calls that every offline engine offers. Each raises EngineDead after the backend was closed."""

    _backend: Backend

    @property
    def model(self) -> ModelInfo:
        """The description of the loaded model."""
        return self._backend.service.model

    def get_tokenizer(self) -> Tokenizer | None:
        return self._backend.service.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Read prompts, show tokens and find end-of-sequence ids by another tokenizer, with its chat template.

        It is one of transformers, a folder that has one, or a `Tokenizer` of Ferrule. Raises RequestError while
        requests run, and CheckpointError for files that cannot be read.
        """
        self._backend.wait(self._backend.set_tokenizer(tokenizer))

    def get_metrics(self) -> list[Metric]:
        """Return a snapshot of all metrics. Raises RequestError with ``disable_log_stats=True``, the default of
        `LLM`.
        """
        return self._backend.wait(self._backend.metrics())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request uses it. Raises RequestError."""
        return self._backend.wait(self._backend.use_adapter(lora_request)) is not None

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter by its `lora_int_id`, and return whether it was loaded; requests that use it go on."""
        return self._backend.wait(self._backend.remove_adapter(lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter on the device, whatever others are used, until it is removed.

        Raises RequestError for one that is not loaded, and where as many are pinned as there are slots.
        """
        return self._backend.wait(self._backend.pin_adapter(lora_id))

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id` of each adapter that is loaded."""
        return set(self._backend.adapters)

    def reset_prefix_cache(self) -> bool:
        return bool(self._call("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and cache; needs ``enable_sleep_mode=True``. Raises RequestError."""
        self._call("sleep", level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` gave back, or of that only the `tags`: weights, kv_cache. Raises RequestError."""
        self._call("wake_up", tags)

    def is_sleeping(self) -> bool:
        return bool(self._call("is_sleeping"))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of `worker_extension_cls`, or a function of the worker, on each worker, and list their answers.

        They must be plain data. An engine in another process imports the function: it must be one of a module.
        Raises RequestError when the method is not there or fails, TimeoutError after `timeout` seconds; what was begun
        goes on.
        """
        return self._backend.wait(self._backend.collective_rpc(method, timeout, args, kwargs))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model, a torch module, on each worker, and list its answers as `collective_rpc`."""
        return self._backend.wait(self._backend.apply_model(func))

    def start_profile(self) -> None:
        """Record what the model computes; needs FERRULE_TORCH_PROFILER_DIR. Raises RequestError."""
        self._call("start_profile")

    def stop_profile(self) -> str:
        """Write the trace and return its file's name. Raises RequestError."""
        return str(self._call("stop_profile"))

    def _call(self, name: str, *args: Any) -> Any:
        return self._backend.wait(self._backend.service.call(name, *args))
