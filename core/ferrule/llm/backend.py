"""`Backend`: a service and its engine on an event loop of their own, which callers of any thread or loop can use.

`LLM`, `LLMEngine` and `AsyncLLM` share it. `Progress` is the one place where the service's outputs become
`RequestOutput`s. No thread or task refers to the `Backend`, so it is closed when the last reference to it is gone, or
when the program ends.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ferrule.assembly.vocabulary import open_tokenizer
from ferrule.client.inline import InlineClient
from ferrule.config import Config, Resolved
from ferrule.config.places import placed
from ferrule.config.sections import ModelConfig
from ferrule.errors import CheckpointError, EngineDead, RequestError
from ferrule.frontend.inputs import open_inputs
from ferrule.frontend.service import FrontendService, build_service, open_reader
from ferrule.frontend.text.builtin import choose_templates
from ferrule.hooks import open_hooks
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.launch.engine_child import EngineChild
from ferrule.launch.prepare import prepare
from ferrule.llm.loop_thread import LoopThread
from ferrule.llm.lora import LoRARequest
from ferrule.llm.metrics import Metric, read_metrics
from ferrule.llm.requests import Requests
from ferrule.locate.localise import find_adapter, localise
from ferrule.plugin import Plugins
from ferrule.wire.functions import find_function, import_path

_NAME = "llm"  # of this process, for log and hooks


class Backend:
    """A loaded model, whose engine runs on a thread of this process, or in a child if the environment says so.

    `wait`, `submit` and `post` are methods of its `LoopThread`. If `close` is never called, the engine is stopped when
    the last reference to this object is gone, or when the program ends. Raises StartupError.
    """

    service: FrontendService
    client: InlineClient | EngineChild
    requests: Requests

    def __init__(self, config: Config, plugins: Plugins, notices: Sequence[str] = ()) -> None:
        with placed(config):
            self._open(config, plugins, notices)

    def _open(self, config: Config, plugins: Plugins, notices: Sequence[str]) -> None:
        resolved, chosen = prepare(config, notices, plugins, _NAME)
        self.config = localise(resolved, chosen)
        self._plugins = chosen
        self._loop = LoopThread(_NAME)
        self.submit, self.wait, self.post = self._loop.submit, self._loop.wait, self._loop.post
        self._abandoned = weakref.finalize(self, self._loop.abandon)  # also runs when the program ends
        try:
            self.wait(self._start(self.config, chosen))
        except BaseException:
            self.close()
            raise

    async def _start(self, config: Resolved, plugins: Plugins) -> None:
        hooks = open_hooks(plugins, config)
        hooks.process_started(_NAME, config)
        self._loop.opened.callback(hooks.process_stopping, _NAME, 0)
        self._inputs = open_inputs(config, plugins)
        own_process = config.env.enable_v1_multiprocessing
        self.client = EngineChild(config, plugins) if own_process else InlineClient(config, plugins)
        self._loop.opened.push_async_callback(self.client.close)
        self.client.begin_loading()  # what has to be checked before is open
        await self.client.wait_ready()
        self.adapters: dict[int, LoRARequest] = {}  # by the numbers that callers have given them
        self._pinned: dict[int, str] = {}  # by lora_int_id: the identities of those that stay on the device
        self.service = build_service(config, plugins, self.client, hooks=hooks, inputs=self._inputs)
        self._loop.opened.push_async_callback(self.service.close)
        self.requests = Requests(self.service)
        self._loop.opened.push_async_callback(self.requests.close)
        if not config.observability.disable_log_stats:
            self.service.start()

    def close(self) -> None:
        """Stop the engine and give its memory back; idempotent."""
        self._loop.close()
        self._abandoned.detach()

    @property
    def closed(self) -> bool:
        return self._loop.closed

    # ------------------------------------------------------------------------------------ calls

    def model_config(self) -> ModelConfig:
        """Return the options of the model; `dtype` and `max_model_len` are those of the loaded model."""
        info = self.service.model
        return replace(self.config.model, dtype=info.dtype, max_model_len=info.max_model_len)

    def check_health(self) -> None:
        """Check that the engine is ready. Raises EngineDead."""
        health = self.client.health()
        if self.closed or health.state != "ready":
            raise EngineDead(health.detail or f"The engine is {health.state}.")

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> list[Any]:
        """See `EngineCalls.collective_rpc`."""
        called: Any = method
        if self.client.remote and not isinstance(method, str):
            called = {"function": import_path(method, "method")}
        work = self.service.call("collective_rpc", called, tuple(args), dict(kwargs or {}))
        return list(await asyncio.wait_for(work, timeout))

    async def apply_model(self, function: Callable[..., Any]) -> list[Any]:
        """See `EngineCalls.apply_model`."""
        found = import_path(function, "func") if self.client.remote else function
        return await self.collective_rpc(call_with_model, None, (found,), None)

    async def use_adapter(self, request: LoRARequest | None) -> str | None:
        """Load an adapter unless it is loaded, and return the name by which requests ask for it; None for none.

        Raises RequestError, also for a number or a name that another adapter has.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError("lora_request must be a LoRARequest.", "lora_request")
        if request.base_model_name not in (None, *self.service.names):
            raise RequestError(f"base_model_name must be one of {', '.join(self.service.names)}.", "lora_request")
        known = self.adapters.get(request.lora_int_id)
        if known is not None and known.lora_name != request.lora_name:
            raise RequestError(
                f"The lora_int_id {request.lora_int_id} is that of the adapter {known.lora_name!r:.80}.", "lora_request"
            )
        own = next((id for id, each in self.adapters.items() if each.lora_name == request.lora_name), None)
        if own not in (None, request.lora_int_id):
            raise RequestError(f"The adapter {request.lora_name!r:.80} has the lora_int_id {own}.", "lora_request")
        pinned = request.load_inplace and await self._unpin(request.lora_int_id)
        try:
            folder = await asyncio.to_thread(find_adapter, self.config, self._plugins, request.lora_path)
            await self.service.ensure_adapter(request.lora_name, str(folder), request.load_inplace)
        except CheckpointError as error:
            raise RequestError(f"lora_request: {error}", "lora_request") from error
        except RequestError as error:
            raise error.about("lora_request") from error
        self.adapters[request.lora_int_id] = request
        if pinned:
            await self.pin_adapter(request.lora_int_id)
        return request.lora_name

    async def pin_adapter(self, lora_id: int) -> bool:
        """Keep a loaded adapter on the device. Raises RequestError, UnavailableError."""
        if lora_id not in self.adapters:
            raise RequestError(f"No adapter with the lora_int_id {lora_id!r:.40} is loaded.", "lora_id")
        if lora_id not in self._pinned:
            self._pinned[lora_id] = await self.service.pin_adapter(self.adapters[lora_id].lora_name)
        return True

    async def _unpin(self, lora_id: int) -> bool:
        identity = self._pinned.pop(lora_id, None)
        if identity is not None:
            await self.service.call("unpin_adapter", identity)
        return identity is not None

    async def remove_adapter(self, lora_id: int) -> bool:
        """Forget an adapter by its number, and return whether it was loaded; requests that use it go on."""
        known = self.adapters.pop(lora_id, None)
        if known is not None:
            await self._unpin(lora_id)
            await self.service.unload_adapter(known.lora_name)
        return known is not None

    async def metrics(self) -> list[Metric]:
        """Return a snapshot of all metrics. Raises RequestError where none are recorded."""
        if self.config.observability.disable_log_stats:
            raise RequestError("No figures are recorded. Pass disable_log_stats=False when the model is loaded.")
        return read_metrics(self.service.exposition()[1])

    async def set_tokenizer(self, given: Any) -> None:
        """See `EngineCalls.set_tokenizer`. Raises RequestError, CheckpointError."""
        tokenizer = await asyncio.to_thread(self._open_tokenizer, given)
        templates = choose_templates(self.config.frontend.chat_template, tokenizer.chat_template)
        inputs = msgspec.structs.replace(self._inputs, tokenizer=tokenizer, templates=templates)
        folder = Path(self.config.model.model)
        await self.service.use(open_reader(self.config, self._plugins, self.client, inputs, folder))

    def _open_tokenizer(self, given: Any) -> Tokenizer:
        if isinstance(given, Tokenizer):
            return given
        config = replace(self.config, model=replace(self.config.model, skip_tokenizer_init=False))
        with TemporaryDirectory(prefix="ferrule-tokenizer-") as folder:
            if hasattr(given, "save_pretrained"):
                given.save_pretrained(folder)
                source = Path(folder)
            elif isinstance(given, str | Path) and Path(given).is_dir():
                source = Path(given)
            else:
                raise RequestError(
                    "tokenizer must be one of transformers, a folder, or a ferrule.interfaces.tokenizer.Tokenizer."
                )
            opened = open_tokenizer(config, self._plugins, source)
        if opened is None:
            raise RequestError(f"{source} has no tokenizer.")
        return opened


def call_with_model(worker: Any, function: Callable[..., Any] | str) -> Any:
    """Call a function, or the one that an import path names, with the worker's model, and return its result."""
    called = find_function(function) if isinstance(function, str) else function
    return called(worker.model_runner.model)
