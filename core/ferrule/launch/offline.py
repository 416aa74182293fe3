"""`LLM`: the same engine, service and gate without a server.

from ferrule import LLM, SamplingParams
llm = LLM("path/to/model")
for output in llm.generate(["Hello", "Who are you?"], SamplingParams(max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar

from tqdm import tqdm

from ferrule import env
from ferrule.config import Config
from ferrule.config.hub import localise
from ferrule.config.parse import from_kwargs
from ferrule.errors import FerruleError, RequestError, RequestFailed
from ferrule.frontend.client_inline import InlineClient
from ferrule.frontend.output import Answer, fold
from ferrule.frontend.service import build_service
from ferrule.interfaces.plugins import Plugins
from ferrule.interfaces.service import ChatPrompt, Generate, Output, Prompt, Service
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.launch.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from ferrule.launch.prepare import prepare
from ferrule.plugin import PluginSet, discover
from ferrule.types import FinishReason, ModelInfo, SamplingParams, TokenLogprobs

T = TypeVar("T")

TextOrIds = str | Mapping[str, Any] | Sequence[int]  # a text, {"prompt": …} or {"prompt_token_ids": …}, or ids
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model that generates in this process.

    `model` is a folder or a hub id; every option of `ferrule serve` that concerns the engine can be given by its name.
    Raises StartupError. Calls are thread-safe and block until all of their outputs are there.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        self._open(from_kwargs(env.read(), model=model, tokenizer=tokenizer, **options), discover())

    @classmethod
    def from_config(cls, config: Config, plugins: Plugins) -> LLM:
        """An `LLM` from sections and discovered plugins, as commands have them."""
        llm = cls.__new__(cls)
        llm._open(config, plugins)
        return llm

    def _open(self, config: Config, plugins: Plugins) -> None:
        config = replace(
            config,
            frontend=replace(config.frontend, disable_log_requests=True),
            observability=replace(config.observability, disable_log_stats=True),
        )
        config, chosen = prepare(config, (), plugins, "llm")
        self._config = config = localise(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._closed = False
        self._opened = AsyncExitStack()  # what `close` closes, last first
        try:
            self._service: Service = self._wait(self._start(config, chosen))
        except BaseException:
            self.close()
            raise

    async def _start(self, config: Config, plugins: PluginSet) -> Service:
        client = InlineClient(config, plugins)
        self._opened.push_async_callback(client.close)
        await client.wait_ready()
        service = build_service(config, plugins, client)
        self._opened.push_async_callback(service.close)
        return service

    @property
    def model(self) -> ModelInfo:
        """What was loaded."""
        return self._service.model

    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        Raises RequestError, before anything runs, when a prompt or parameter is not valid for this model.
        """
        return self._run([_prompt(p) for p in _many(prompts)], sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        `template` takes chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message, documents.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        chats = [
            ChatPrompt(
                messages=tuple(dict(m) for m in conversation),  # type: ignore[arg-type]
                tools=tuple(dict(t) for t in tools) if tools else None,
                **template,
            )
            for conversation in many
        ]
        return self._run(chats, sampling_params, use_tqdm, None)

    def get_tokenizer(self) -> Tokenizer | None:
        return self._service.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults of the model's generation config."""
        return SamplingParams(**self._service.sampling_defaults())

    def reset_prefix_cache(self) -> bool:
        return bool(self._wait(self._service.call("reset_prefix_cache")))

    def close(self) -> None:
        """Stop the engine and give its memory back; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wait(self._opened.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(
        self,
        prompts: Sequence[Prompt | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        levels = [0] * len(prompts) if priority is None else list(priority)
        if not len(each) == len(levels) == len(prompts):
            raise RequestError(
                "There must be one sampling_params (and one priority) for each prompt.", "sampling_params"
            )
        requests = [
            Generate(prompts=(prompt,), params=one, priority=level, raw=True)
            for prompt, one, level in zip(prompts, each, levels, strict=True)
        ]
        with tqdm(total=len(requests), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._wait(self._gather(requests, bar))

    async def _gather(self, requests: Sequence[Generate], bar: tqdm[Any]) -> list[RequestOutput]:
        """Keep the engine's batch full without queueing everything at once; the first error ends all."""
        gate = asyncio.Semaphore(2 * (self._config.scheduler.max_num_seqs or 1))

        async def one(number: int, request: Generate) -> RequestOutput:
            async with gate:
                output = await self._complete(str(number), request)
            bar.update()
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(n, r)) for n, r in enumerate(requests)]
        except* FerruleError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _complete(self, request_id: str, request: Generate) -> RequestOutput:
        outputs: list[Output] = []
        async with aclosing(await self._service.generate(request)) as stream:  # type: ignore[type-var]
            async for output in stream:
                outputs.append(output)
        answers = fold(outputs)
        failed = next((a for a in answers if a.finish is FinishReason.ERROR), None)
        if failed is not None:
            raise RequestFailed(failed.error or "The request failed.")
        first = answers[0]
        return RequestOutput(
            request_id=request_id,
            prompt=first.prompt_text,
            prompt_token_ids=list(first.prompt_ids),
            outputs=[self._choice(number, answer) for number, answer in enumerate(answers)],
            prompt_logprobs=None
            if first.prompt_logprobs is None
            else [None if p is None else self._position(p) for p in first.prompt_logprobs],
            num_cached_tokens=first.usage.cached_tokens,
        )

    def _choice(self, number: int, answer: Answer) -> CompletionOutput:
        return CompletionOutput(
            index=number,
            text=answer.text,
            token_ids=list(answer.token_ids),
            cumulative_logprob=sum(p.logprob for p in answer.logprobs) if answer.logprobs else None,
            logprobs=[self._position(p) for p in answer.logprobs] if answer.logprobs else None,
            finish_reason=None if answer.finish is None else str(answer.finish),
            stop_reason=answer.stop_reason,
        )

    def _position(self, position: TokenLogprobs) -> PositionLogprobs:
        found = {
            token_id: Logprob(logprob, rank, self._service.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(position.top, 1)
        }
        found.setdefault(
            position.token_id, Logprob(position.logprob, position.rank, self._service.token_text(position.token_id))
        )
        return found


def _many(prompts: Any) -> Sequence[TextOrIds]:
    """One prompt is a list of one: a text, a mapping, or a list whose first element is an id."""
    one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    return [prompts] if one else list(prompts)


def _prompt(prompt: TextOrIds) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if (ids is None) == (text is None):
            raise RequestError("A prompt is {'prompt': text} or {'prompt_token_ids': ids}.", "prompts")
        return Prompt(text=text) if ids is None else Prompt(ids=tuple(ids))
    return Prompt(ids=tuple(prompt))
