"""`LLMEngine`: requests that are added one by one, and whose outputs are fetched step by step."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ferrule.config import Config
from ferrule.config.sections import ModelConfig
from ferrule.errors import RequestError
from ferrule.interfaces.service import Generate
from ferrule.llm.arguments import EngineArgs
from ferrule.llm.backend import Backend
from ferrule.llm.calls import EngineCalls
from ferrule.llm.lora import LoRARequest
from ferrule.llm.outputs import RequestOutput
from ferrule.llm.prompts import TextOrIds, read_prompt
from ferrule.llm.requests import News, Running
from ferrule.sampling_params import SamplingParams


def running_request(
    request_id: str,
    prompt: TextOrIds,
    params: SamplingParams,
    model: str | None,
    priority: int,
    trace_headers: Mapping[str, str] | None,
) -> Running:
    """Make a request as callers of an engine describe it, whose news go nowhere yet; `model` is the name of an adapter.

    Raises RequestError.
    """
    if not isinstance(request_id, str):
        raise RequestError("request_id must be a string.", "request_id")
    given = read_prompt(prompt, "prompt")
    request = Generate(
        prompts=(given.prompt,),
        params=params,
        model=model,
        priority=priority,
        cache_salt=given.cache_salt,
        raw=True,
        answer_id=request_id,
    )
    headers = {name.lower(): value for name, value in (trace_headers or {}).items()}
    return Running(request_id, request, lambda news: None, given.text, headers=headers)


def _while_there(deliver: Callable[[Running, News], None], running: Running) -> Callable[[News], None]:
    """Return a function that calls a method for as long as others refer to its object: a running request does not keep
    its engine alive.
    """
    method = weakref.WeakMethod(deliver)

    def call(news: News) -> None:
        found = method()
        if found is not None:
            found(running, news)

    return call


class LLMEngine(EngineCalls):
    """An engine driven by `step`, in the documented form. It computes by itself: `step` only returns what has come
    since the last one.

    Made by `from_engine_args`, or as `LLM.llm_engine`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: dict[str, Running] = {}  # until their last output was returned
        self._news: deque[tuple[Running, News]] = deque()
        self._changed = threading.Condition()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Load the model. Raises StartupError."""
        return cls(engine_args.open())

    def add_request(
        self,
        request_id: str,
        prompt: TextOrIds,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Begin a request. With `trace_headers` its span continues a trace: traceparent, tracestate.

        Raises RequestError for whatever is wrong with it, and for an id that is in use.
        """
        model = self._backend.wait(self._backend.use_adapter(lora_request))
        running = running_request(request_id, prompt, params, model, priority, trace_headers)
        running.deliver = _while_there(self._deliver, running)
        with self._changed:
            if request_id in self._running:
                raise RequestError(f"The request_id {request_id!r:.80} is in use.", "request_id")
            self._running[request_id] = running
        try:
            self._backend.wait(self._backend.requests.start(running))
        except BaseException:
            self._forget([request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Wait for news, and return them: one output for each request that has some. [] when no request runs.

        Raises RequestFailed when a request failed, EngineDead when the engine did; other requests go on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._news or not self._running)
            taken: dict[str, RequestOutput] = {}
            later: deque[tuple[Running, News]] = deque()
            while self._news:
                running, news = self._news.popleft()
                name = running.request_id
                if name in taken or (isinstance(news, Exception) and (taken or later)):
                    later.append((running, news))
                elif isinstance(news, Exception):
                    self._running.pop(name, None)
                    raise news
                else:
                    taken[name] = news
                    if news.finished:
                        self._running.pop(name, None)
            self._news = later
            return list(taken.values())

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, without further outputs. Unknown ids are ignored."""
        for running in self._forget([request_id] if isinstance(request_id, str) else request_id):
            self._backend.post(self._backend.requests.drop, running)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to return, now or later."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def get_model_config(self) -> ModelConfig:
        """Return the options of the model, with `dtype` and `max_model_len` of the loaded model."""
        return self._backend.model_config()

    @property
    def config(self) -> Config:
        """All options, resolved."""
        return self._backend.config

    def check_health(self) -> None:
        """Check that the engine lives. Raises EngineDead when the engine is gone, or makes no progress."""
        self._backend.check_health()

    def shutdown(self) -> None:
        """Stop the engine and give its memory back; idempotent."""
        self._backend.close()

    def _deliver(self, running: Running, news: News) -> None:
        """Store a request's news for `step`; called on the event loop."""
        with self._changed:
            if self._running.get(running.request_id) is running:
                self._news.append((running, news))
                self._changed.notify_all()

    def _forget(self, ids: Iterable[str]) -> list[Running]:
        with self._changed:
            found = [running for name in ids if (running := self._running.pop(name, None)) is not None]
            self._news = deque(entry for entry in self._news if entry[0] not in found)
            self._changed.notify_all()
            return found
