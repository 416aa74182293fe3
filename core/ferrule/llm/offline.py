"""`LLM`: the same engine, service and gate without a server.

from ferrule import LLM, SamplingParams
llm = LLM("path/to/model")
for output in llm.generate(["Hello", "Who are you?"], SamplingParams(max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tqdm import tqdm

from ferrule.config import Config
from ferrule.errors import FerruleError, RequestError
from ferrule.interfaces.service import Generate, Pool
from ferrule.llm.arguments import read_options
from ferrule.llm.backend import Backend
from ferrule.llm.calls import EngineCalls
from ferrule.llm.engine import LLMEngine
from ferrule.llm.lora import LoRARequest
from ferrule.llm.outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    RequestOutput,
    beam_output,
)
from ferrule.llm.progress import whole
from ferrule.llm.prompt_adapters import Adapters, adapted
from ferrule.llm.prompts import ChatFields, Conversation, Given, TextOrIds, read_conversations, read_prompts
from ferrule.plugin import Plugins, discover
from ferrule.sampling_params import Beam, SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
_Found = TypeVar("_Found")
Adapted = LoRARequest | Sequence[LoRARequest | None] | None  # of all prompts, or of each
Progressing = bool | Callable[..., Any]  # whether to show a bar, or what makes one, called as tqdm is


def _needs(task: str) -> Callable[..., Any]:
    def refuse(self: LLM, *args: Any, **kwargs: Any) -> Any:
        """Raise RequestError: no model that this version serves does this."""
        tasks = ", ".join(self.model.tasks)
        raise RequestError(
            f"This model runs task {tasks} (LLM.generate and LLM.chat, or LLM.embed); this call needs task {task}, "
            "which is not in this build."
        )

    return refuse


class LLM(EngineCalls):
    """A model for batches of prompts.

    `model` is a folder or a hub id; every option of `ferrule serve` that concerns the engine can be given by its name.
    Raises StartupError. Calls are thread-safe and block until all of their outputs are there.
    """

    llm_engine: LLMEngine  # for requests that are added one by one

    def __init__(
        self, model: str, *, tokenizer: str | None = None, disable_log_stats: bool = True, **options: Any
    ) -> None:
        parsed = read_options(model, tokenizer=tokenizer, disable_log_stats=disable_log_stats, **options)
        self._open(parsed.config, discover(), parsed.notices)

    @classmethod
    def from_config(cls, config: Config, plugins: Plugins) -> LLM:
        """Create an `LLM` from sections and discovered plugins, as commands have them."""
        llm = cls.__new__(cls)
        silent = replace(config.observability, disable_log_stats=True)
        limits = replace(config.limits, trust_request_chat_template=True)
        llm._open(replace(config, observability=silent, limits=limits), plugins)
        return llm

    def _open(self, config: Config, plugins: Plugins, notices: Sequence[str] = ()) -> None:
        most = sys.maxsize  # the application's own matter
        limits = replace(config.limits, max_buffered_bytes=most, max_logprob_cells=most, max_prompt_logprob_cells=most)
        config = replace(config, frontend=replace(config.frontend, disable_log_requests=True), limits=limits)
        self._backend = Backend(config, plugins, notices)
        self.llm_engine = LLMEngine(self._backend)

    # ------------------------------------------------------------------------------------ texts

    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: Params = None,
        *,
        use_tqdm: Progressing = True,
        lora_request: Adapted = None,
        priority: Sequence[int] | None = None,
        prompt_adapter_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the order of the prompts. `lora_request` and `prompt_adapter_request`: one
        adapter, or one for each prompt.

        Raises RequestError, before anything runs, when a prompt or parameter is not valid for this model.
        """
        given = adapted(read_prompts(prompts), prompt_adapter_request)
        return self._sample(given, sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: Progressing = True,
        lora_request: Adapted = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_content_format: str = "auto",
        prompt_adapter_request: Adapters = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. `chat_template` is a template's text.

        `template` takes chat_template, chat_template_kwargs, add_generation_prompt, continue_final_message, documents.
        Raises RequestError that names what is wrong.
        """
        fields = _chat_fields(tools, chat_template_content_format, template)
        given = adapted(read_conversations(messages, fields), prompt_adapter_request)
        return self._sample(given, sampling_params, use_tqdm, lora_request, None)

    def preprocess_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_content_format: str = "auto",
        **template: Any,
    ) -> list[dict[str, Any]]:
        """Return what `chat` would generate from, as prompts for `generate`: ``prompt_token_ids``, and the text as
        ``prompt``.

        The arguments are those of `chat`. Raises RequestError.
        """
        fields = _chat_fields(tools, chat_template_content_format, template)
        read = [
            self._backend.wait(self._backend.service.read(chat.prompt)) for chat in read_conversations(messages, fields)
        ]
        return [{"prompt_token_ids": list(one.ids), "prompt": one.text} for one in read]

    def beam_search(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        params: BeamSearchParams,
        *,
        lora_request: Adapted = None,
        prompt_adapter_request: Adapters = None,
        use_tqdm: Progressing = False,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best continuations of each prompt. Raises RequestError."""
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=params.temperature,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=0,
        )
        beam = Beam(width=params.beam_width, length_penalty=params.length_penalty)
        read = adapted(read_prompts(prompts), prompt_adapter_request)
        requests = [
            (
                Generate(
                    prompts=(given.prompt,),
                    params=sampling,
                    model=model,
                    cache_salt=given.cache_salt,
                    beam=beam,
                    prompt_adapter=given.prompt_adapter,
                    raw=True,
                ),
                None,
            )
            for given, model in zip(read, self._adapters(lora_request, len(read)), strict=True)
        ]
        found = self._generate(requests, use_tqdm)
        detokenize = self._backend.service.detokenize
        texts = [one.prompt or self._backend.wait(detokenize(one.prompt_token_ids)) for one in found]
        return [beam_output(one, text) for one, text in zip(found, texts, strict=True)]

    def embed(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        *,
        use_tqdm: Progressing = True,
        lora_request: Adapted = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts, in their order.

        Raises RequestError, also for a model that generates and gives no vectors.
        """
        normalize = None if pooling_params is None else pooling_params.normalize
        read = read_prompts(prompts)
        requests = [
            Pool(prompts=(given.prompt,), normalize=normalize, model=model, cache_salt=given.cache_salt)
            for given, model in zip(read, self._adapters(lora_request, len(read)), strict=True)
        ]
        return self._run([partial(self._embed, request) for request in requests], use_tqdm)

    encode, classify, score = _needs("encode"), _needs("classify"), _needs("score")

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the model's generation config."""
        return SamplingParams(**self._backend.service.sampling_defaults())

    def close(self) -> None:
        """Stop the engine and give its memory back; idempotent."""
        self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ parts

    def _sample(
        self,
        prompts: Sequence[Given],
        params: Params,
        use_tqdm: Progressing,
        lora_request: Adapted,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        levels = [0] * len(prompts) if priority is None else list(priority)
        if not len(each) == len(levels) == len(prompts):
            raise RequestError("Each prompt needs one sampling_params (and one priority).", "sampling_params")
        models = self._adapters(lora_request, len(prompts))
        requests = [
            (
                Generate(
                    prompts=(given.prompt,),
                    params=one,
                    model=model,
                    prompt_adapter=given.prompt_adapter,
                    priority=level,
                    cache_salt=given.cache_salt,
                    raw=True,
                    streamed=False,
                ),
                given.text,
            )
            for given, one, model, level in zip(prompts, each, models, levels, strict=True)
        ]
        return self._generate(requests, use_tqdm)

    def _adapters(self, given: Adapted, num_prompts: int) -> list[str | None]:
        """Load adapters, and return the name of each prompt's; None for none. Raises RequestError."""
        each: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * num_prompts
        if len(each) != num_prompts:
            raise RequestError("Each prompt needs one lora_request, which may be None.", "lora_request")
        loaded = {one: self._backend.wait(self._backend.use_adapter(one)) for one in dict.fromkeys(each)}
        return [loaded[one] for one in each]

    def _generate(self, requests: Sequence[tuple[Generate, str | None]], use_tqdm: Progressing) -> list[RequestOutput]:
        """Generate for each request, which comes with the text of its prompt where the prompt is ids."""
        return self._run([partial(self._complete, *request) for request in requests], use_tqdm)

    def _run(self, calls: Sequence[Callable[[str], Awaitable[_Found]]], use_tqdm: Progressing) -> list[_Found]:
        """Run the calls, each of which is given an id, and return their results."""
        if self.is_sleeping():
            raise RequestError("The model sleeps: call LLM.wake_up first.")
        show = use_tqdm if callable(use_tqdm) else tqdm
        with show(total=len(calls), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._backend.wait(self._gather(calls, bar))

    async def _gather(self, calls: Sequence[Callable[[str], Awaitable[_Found]]], bar: Any) -> list[_Found]:
        """Keep the engine's batch full without queueing everything at once; the first error ends all."""
        gate = asyncio.Semaphore(2 * self._backend.config.scheduler.max_num_seqs)

        async def one(number: int, call: Callable[[str], Awaitable[_Found]]) -> _Found:
            async with gate:
                output = await call(str(number))
            bar.update()
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number, call)) for number, call in enumerate(calls)]
        except* FerruleError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _embed(self, request: Pool, request_id: str) -> EmbeddingRequestOutput:
        (found,) = await self._backend.service.pool(request)
        return EmbeddingRequestOutput(
            request_id=request_id,
            outputs=EmbeddingOutput(embedding=list(found.vector)),
            prompt_token_ids=list(found.prompt_ids),
            num_cached_tokens=found.cached_tokens,
        )

    async def _complete(self, request: Generate, text: str | None, request_id: str) -> RequestOutput:
        service = self._backend.service
        admitted = await service.admit(request)
        return whole(request_id, await admitted.answer(), admitted.tokens or service, admitted.prompts[0], text)


def _chat_fields(
    tools: Sequence[Mapping[str, Any]] | None, content_format: str, template: dict[str, Any]
) -> ChatFields:
    return ChatFields(
        tools=[dict(tool) for tool in tools] if tools else None,
        chat_template_content_format=content_format,  # type: ignore[arg-type]
        **template,
    )
