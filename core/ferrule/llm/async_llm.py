"""`AsyncLLM`: outputs as they come, for programs with an event loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ferrule.config.sections import ModelConfig
from ferrule.errors import EngineDead
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.llm.arguments import AsyncEngineArgs
from ferrule.llm.backend import Backend
from ferrule.llm.engine import running_request
from ferrule.llm.lora import LoRARequest
from ferrule.llm.metrics import Metric
from ferrule.llm.outputs import RequestOutput
from ferrule.llm.prompt_adapters import PromptAdapterRequest
from ferrule.llm.prompts import TextOrIds
from ferrule.llm.requests import News
from ferrule.sampling_params import SamplingParams
from ferrule.types import ModelInfo

T = TypeVar("T")


class AsyncLLM:
    """An engine that any event loop may use, and several at once. Made by `from_engine_args`, in a loop or before one.

    It is a context manager; `shutdown` frees all memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Load the model, which blocks. Raises StartupError."""
        return cls(engine_args.open())

    @property
    def model(self) -> ModelInfo:
        """The description of the loaded model."""
        return self._backend.service.model

    # ------------------------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: TextOrIds,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of one prompt, until one is `finished`; `SamplingParams.output_kind` decides what each has.

        With `trace_headers` the request's span continues a trace: traceparent, tracestate.
        Closing the generator, or cancelling the task that iterates over it, ends the request and frees its memory.
        Raises RequestError for whatever is wrong with the request, RequestFailed, EngineDead.
        """
        model = await self._ask(self._backend.use_adapter(lora_request))
        running = running_request(
            request_id, prompt, sampling_params, model, priority, trace_headers, prompt_adapter_request
        )
        arrived: asyncio.Queue[News] = asyncio.Queue()
        running.deliver = _across(asyncio.get_running_loop(), arrived)
        try:
            await self._ask(self._backend.requests.start(running))
            while True:
                news = await arrived.get()
                if isinstance(news, Exception):
                    raise news
                yield news
                if news.finished:
                    return
        finally:
            self._backend.post(self._backend.requests.drop, running)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: each generator yields a last output, with finish reason "abort". Unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._backend.post(self._backend.requests.abort, ids)

    # ------------------------------------------------------------------------------------ the engine

    async def get_tokenizer(self) -> Tokenizer | None:
        return self._backend.service.tokenizer

    async def get_model_config(self) -> ModelConfig:
        """Return the options of the model, with `dtype` and `max_model_len` of the loaded model."""
        return self._backend.model_config()

    async def get_metrics(self) -> list[Metric]:
        """Return a snapshot of all metrics. Raises RequestError with ``disable_log_stats=True``."""
        return await self._ask(self._backend.metrics())

    async def check_health(self) -> None:
        """Check that the engine lives. Raises EngineDead when the engine is gone, or makes no progress."""
        self._backend.check_health()

    @property
    def is_running(self) -> bool:
        return not (self._backend.closed or self.errored)

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has died; False after `shutdown`."""
        return not self._backend.closed and self._backend.client.health().state == "dead"

    @property
    def dead_error(self) -> EngineDead:
        """The exception that calls raise when the engine has died."""
        return EngineDead(self._backend.client.health().detail or "The engine has ended.")

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        return await self._ask(self._backend.use_adapter(lora_request)) is not None

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        return await self._ask(self._backend.remove_adapter(lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLM.pin_lora`."""
        return await self._ask(self._backend.pin_adapter(lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return set(self._backend.adapters)

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`."""
        await self._call("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        return await self._ask(self._backend.collective_rpc(method, timeout, args, kwargs))

    async def start_profile(self) -> None:
        """See `LLM.start_profile`."""
        await self._call("start_profile")

    async def stop_profile(self) -> str:
        """See `LLM.stop_profile`."""
        return str(await self._call("stop_profile"))

    def shutdown(self) -> None:
        """Stop the engine, which ends all generators with EngineDead, and give its memory back; idempotent."""
        self._backend.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------------------------ parts

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._backend.submit(work))

    async def _call(self, name: str, *args: Any) -> Any:
        return await self._ask(self._backend.service.call(name, *args))


AsyncLLMEngine = AsyncLLM  # its former name


def _across(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[News]) -> Callable[[News], None]:
    """Return a function that puts news into a queue of another event loop; when that loop is closed, nobody reads the
    news.
    """

    def deliver(news: News) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, news)

    return deliver
