"""`LLM`: the same engine, service and gate without a server.

from ferrule import LLM, SamplingParams
llm = LLM("path/to/model")
for output in llm.generate(["Hello", "Who are you?"], SamplingParams(max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar

from tqdm import tqdm

from ferrule import env
from ferrule.client.inline import InlineClient
from ferrule.config import Config, Resolved
from ferrule.config.parse import parse_kwargs
from ferrule.config.unsupported import engine_sections
from ferrule.errors import EngineDead, FerruleError, RequestError, RequestFailed
from ferrule.frontend.inputs import open_inputs
from ferrule.frontend.output.choice import fold
from ferrule.frontend.service import build_service
from ferrule.hooks import open_hooks
from ferrule.interfaces.service import Generate, Output, Service
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.launch.localise import localise
from ferrule.launch.prepare import prepare
from ferrule.llm.outputs import BeamSearchOutput, BeamSearchParams, RequestOutput, beam_output, request_output
from ferrule.llm.prompts import ChatFields, Conversation, Given, TextOrIds, read_conversations, read_prompts
from ferrule.plugin import Plugins, discover
from ferrule.sampling_params import Beam, SamplingParams
from ferrule.types import FinishReason, ModelInfo

T = TypeVar("T")

Params = SamplingParams | Sequence[SamplingParams] | None
Progress = bool | Callable[..., Any]  # whether to show a bar, or what makes one, called as tqdm is

_NAME = "llm"  # of this process, for log and hooks


def _needs(task: str) -> Callable[..., Any]:
    def refuse(self: LLM, *args: Any, **kwargs: Any) -> Any:
        """Raises RequestError: no model that this version serves does this."""
        tasks = ", ".join(self.model.tasks)
        raise RequestError(
            f"This model runs task {tasks} (LLM.generate, LLM.chat); this call needs task {task}, which is not in this "
            "build."
        )

    return refuse


class LLM:
    """A model that generates in this process.

    `model` is a folder or a hub id; every option of `ferrule serve` that concerns the engine can be given by its name.
    Raises StartupError. Calls are thread-safe and block until all of their outputs are there.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, **options: Any) -> None:
        parsed = parse_kwargs(env.read(), engine_sections(), model=model, tokenizer=tokenizer, **options)
        self._open(parsed.config, discover(), parsed.notices)

    @classmethod
    def from_config(cls, config: Config, plugins: Plugins) -> LLM:
        """An `LLM` from sections and discovered plugins, as commands have them."""
        llm = cls.__new__(cls)
        llm._open(config, plugins)
        return llm

    def _open(self, config: Config, plugins: Plugins, notices: Sequence[str] = ()) -> None:
        given = replace(
            config,
            frontend=replace(config.frontend, disable_log_requests=True),
            observability=replace(config.observability, disable_log_stats=True),
            limits=replace(config.limits, trust_request_chat_template=True),  # there is no other client
        )
        resolved, chosen = prepare(given, notices, plugins, _NAME)
        self._config = localise(resolved, chosen)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=_NAME, daemon=True)
        self._thread.start()
        self._closed = False
        self._opened = AsyncExitStack()  # what `close` closes, last first
        try:
            self._service: Service = self._wait(self._start(self._config, chosen))
        except BaseException:
            self.close()
            raise

    async def _start(self, config: Resolved, plugins: Plugins) -> Service:
        hooks = open_hooks(plugins)
        hooks.process_started(_NAME, config)
        self._opened.callback(hooks.process_stopping, _NAME, 0)
        inputs = open_inputs(config, plugins)
        client = InlineClient(config, plugins)
        self._opened.push_async_callback(client.close)
        await client.wait_ready()
        service = build_service(config, plugins, client, hooks=hooks, inputs=inputs)
        self._opened.push_async_callback(service.close)
        return service

    @property
    def model(self) -> ModelInfo:
        """What was loaded."""
        return self._service.model

    # ------------------------------------------------------------------------------------ texts

    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts.

        Raises RequestError, before anything runs, when a prompt or parameter is not valid for this model.
        """
        return self._sample(read_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_content_format: str = "auto",
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. `chat_template` is a template's text.

        `template` takes chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message, documents.
        Raises RequestError that names what is wrong.
        """
        fields = ChatFields(
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template_content_format=chat_template_content_format,  # type: ignore[arg-type]
            **template,
        )
        return self._sample(read_conversations(messages, fields), sampling_params, use_tqdm, None)

    def beam_search(
        self, prompts: TextOrIds | Sequence[TextOrIds], params: BeamSearchParams, *, use_tqdm: Progress = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt. Raises RequestError."""
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=params.temperature,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=0,
        )
        beam = Beam(width=params.beam_width, length_penalty=params.length_penalty)
        requests = [
            Generate(prompts=(given.prompt,), params=sampling, cache_salt=given.cache_salt, beam=beam, raw=True)
            for given in read_prompts(prompts)
        ]
        found = self._run(requests, use_tqdm)
        texts = [one.prompt or self._wait(self._service.detokenize(one.prompt_token_ids)) for one in found]
        return [beam_output(one, text) for one, text in zip(found, texts, strict=True)]

    encode, embed, classify, score = _needs("embed"), _needs("embed"), _needs("classify"), _needs("score")

    # ------------------------------------------------------------------------------------ the engine

    def get_tokenizer(self) -> Tokenizer | None:
        return self._service.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults of the model's generation config."""
        return SamplingParams(**self._service.sampling_defaults())

    def reset_prefix_cache(self) -> bool:
        return bool(self._call("reset_prefix_cache"))

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and cache; needs ``enable_sleep_mode=True``. Raises RequestError."""
        self._call("sleep", level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` gave back, or of that only the `tags`: weights, kv_cache. Raises RequestError."""
        self._call("wake_up", tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of `worker_extension_cls`, or a function of the worker, on each worker, and list their answers.

        They must be plain data. Raises RequestError when the method is not there or fails, TimeoutError after `timeout`
        seconds; what was begun goes on.
        """
        work = self._service.call("collective_rpc", method, tuple(args), dict(kwargs or {}))
        return list(self._wait(asyncio.wait_for(work, timeout)))

    def start_profile(self) -> None:
        """Record what the model computes; needs FERRULE_TORCH_PROFILER_DIR. Raises RequestError."""
        self._call("start_profile")

    def stop_profile(self) -> str:
        """Write the trace; its file's name. Raises RequestError."""
        return str(self._call("stop_profile"))

    def close(self) -> None:
        """Stop the engine and give its memory back; idempotent."""
        if self._closed:
            return
        try:
            self._wait(self._opened.aclose())
        finally:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ parts

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises EngineDead after `close`."""
        if self._closed:
            work.close()
            raise EngineDead("This LLM was closed. Make another one to go on.")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _call(self, name: str, *args: Any) -> Any:
        return self._wait(self._service.call(name, *args))

    def _sample(
        self,
        prompts: Sequence[Given],
        params: Params,
        use_tqdm: Progress,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        levels = [0] * len(prompts) if priority is None else list(priority)
        if not len(each) == len(levels) == len(prompts):
            raise RequestError("Each prompt needs one sampling_params (and one priority).", "sampling_params")
        requests = [
            Generate(
                prompts=(given.prompt,),
                params=one,
                priority=level,
                cache_salt=given.cache_salt,
                grammar=one.grammar,
                raw=True,
            )
            for given, one, level in zip(prompts, each, levels, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def _run(self, requests: Sequence[Generate], use_tqdm: Progress) -> list[RequestOutput]:
        if self._call("is_sleeping"):
            raise RequestError("The model sleeps: call LLM.wake_up first.")
        show = use_tqdm if callable(use_tqdm) else tqdm
        with show(total=len(requests), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._wait(self._gather(requests, bar))

    async def _gather(self, requests: Sequence[Generate], bar: Any) -> list[RequestOutput]:
        """Keep the engine's batch full without queueing everything at once; the first error ends all."""
        gate = asyncio.Semaphore(2 * self._config.scheduler.max_num_seqs)

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
        return request_output(request_id, answers, self._service)
