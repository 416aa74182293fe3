"""`Backend`: a service and its engine on an event loop of their own, which callers of any thread or loop can use."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from ferrule.assembly.vocabulary import open_tokenizer
from ferrule.client.inline import InlineClient
from ferrule.config import Config, Resolved
from ferrule.config.sections import ModelConfig
from ferrule.errors import EngineDead, RequestError
from ferrule.frontend.inputs import open_inputs
from ferrule.frontend.service import FrontendService, build_service, open_reader
from ferrule.frontend.text.render import choose_templates
from ferrule.hooks import open_hooks
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.launch.engine_child import EngineChild
from ferrule.launch.prepare import prepare
from ferrule.llm.metrics import Metric, read_metrics
from ferrule.llm.requests import Requests
from ferrule.locate.localise import localise
from ferrule.plugin import Plugins
from ferrule.wire.functions import find_function, import_path

T = TypeVar("T")

_NAME = "llm"  # of this process, for log and hooks


class Backend:
    """Loads a model. The engine runs on a thread of this process, or in a child if the environment says so.

    `wait`, `submit`, `post` and `close` may be called from any thread but that of the event loop; what they are given
    runs there. Raises StartupError.
    """

    service: FrontendService
    client: InlineClient | EngineChild
    requests: Requests

    def __init__(self, config: Config, plugins: Plugins, notices: Sequence[str] = ()) -> None:
        resolved, chosen = prepare(config, notices, plugins, _NAME)
        self.config = localise(resolved, chosen)
        self._plugins = chosen
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=_NAME, daemon=True)
        self._thread.start()
        self._closing = threading.Lock()
        self._closed = False
        self._opened = AsyncExitStack()  # what `close` closes, last first
        atexit.register(self._leave)
        try:
            self.wait(self._start(self.config, chosen))
        except BaseException:
            self.close()
            raise

    async def _start(self, config: Resolved, plugins: Plugins) -> None:
        hooks = open_hooks(plugins)
        hooks.process_started(_NAME, config)
        self._opened.callback(hooks.process_stopping, _NAME, 0)
        self._inputs = open_inputs(config, plugins)
        own_process = config.env.enable_v1_multiprocessing
        self.client = EngineChild(config, plugins) if own_process else InlineClient(config, plugins)
        self._opened.push_async_callback(self.client.close)
        self.client.begin_loading()  # what has to be checked before is open
        await self.client.wait_ready()
        self.service = build_service(config, plugins, self.client, hooks=hooks, inputs=self._inputs)
        self._opened.push_async_callback(self.service.close)
        self.requests = Requests(self.service)
        self._opened.push_async_callback(self.requests.close)
        if not config.observability.disable_log_stats:
            self.service.start()

    # ------------------------------------------------------------------------------------ the loop

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Raises EngineDead after `close`."""
        if self._closed:
            work.close()
            raise EngineDead("This LLM was closed. Make another one to go on.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs on the loop, and ends when the wait for it is interrupted.

        Raises EngineDead after `close`.
        """
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # after a KeyboardInterrupt; otherwise it is over already

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop soon; after `close`, when there is nothing to do any more, never."""
        with self._closing:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Stop the engine and give its memory back; idempotent."""
        if self._closed:
            return
        try:
            self.wait(self._end())
        finally:
            with self._closing:
                self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """The program ends without `close`: a thread that computes while the interpreter goes down would abort it."""
        if self._thread.is_alive():  # not in a child that was forked
            self.close()

    async def _end(self) -> None:
        try:
            await self._opened.aclose()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}  # calls of other threads: nobody answers them now
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    # ------------------------------------------------------------------------------------ calls

    def model_config(self) -> ModelConfig:
        """The options of the model; `dtype` and `max_model_len` are those of the model that was loaded."""
        info = self.service.model
        return replace(self.config.model, dtype=info.dtype, max_model_len=info.max_model_len)

    def check_health(self) -> None:
        """Raises EngineDead."""
        health = self.client.health()
        if self._closed or health.state != "ready":
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

    async def metrics(self) -> list[Metric]:
        """Raises RequestError without figures."""
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
    """What a function, or the one that an import path names, returns for the worker's model."""
    called = find_function(function) if isinstance(function, str) else function
    return called(worker.model_runner.model)
