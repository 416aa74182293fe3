"""A service without an engine: tokens are characters, a script generates, the checks are the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ferrule.config import LimitsConfig
from ferrule.errors import FerruleError, NotFoundError, RequestError
from ferrule.frontend.admission.processors import check_processors
from ferrule.frontend.admission.validate import AdmissionRules, check_beam, check_ids, check_params, fit
from ferrule.interfaces.parsers import CallStart, Content
from ferrule.interfaces.service import (
    Admitted,
    ChatPrompt,
    Generate,
    Health,
    Output,
    Outputs,
    Pool,
    Pooled,
    Prompt,
    ReadPrompt,
    ServedAdapter,
    Service,
    Usage,
)
from ferrule.interfaces.stats import HttpStats
from ferrule.types import CacheGroup, FinishReason, ModelInfo, TokenLogprobs

VOCAB = 1 << 14

Script = Callable[[Generate, int, tuple[int, ...]], Sequence[Output]]


def fake_model(max_model_len: int = 256) -> ModelInfo:
    return ModelInfo(
        architecture="FakeForCausalLM",
        implementation="fake",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        dtype="float32",
        device="cpu",
        attention="none",
        groups=(CacheGroup("full", 16),),
        page_bytes=0,
        max_blocks=64,
    )


def echo_script(request: Generate, index: int, ids: tuple[int, ...]) -> Sequence[Output]:
    """Spell out the prompt again in the choice, one character per output, up to max_tokens."""
    most = len(ids) if request.params.max_tokens is None else request.params.max_tokens
    text = "".join(map(chr, ids))[:most]
    outputs = []
    for place, char in enumerate(text):
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.params.logprobs is not None:
            top = tuple((ord("A") + rank, -float(rank + 1)) for rank in range(request.params.logprobs))
            logprobs = (TokenLogprobs(ord(char), -0.5, 1, top),)
        outputs.append(
            Output(
                index=index,
                events=(Content(char),),
                token_ids=(ord(char),),
                logprobs=logprobs,
                token_offsets=(place,),
                usage=Usage(prompt_tokens=len(ids), completion_tokens=place + 1, cached_tokens=1),
                finish=FinishReason.LENGTH if place + 1 == len(text) else None,
            )
        )
    return outputs


class ScriptedService(Service):
    """A service with scripted outputs. `pace` is awaited before each output, so that a test decides when it comes."""

    def __init__(self, script: Script = echo_script, max_model_len: int = 256) -> None:
        self.model = fake_model(max_model_len)
        self.tokenizer = None
        self.names = ("fake", "alias")
        self.script = script
        self.state = "ready"
        self.rules = AdmissionRules(
            limits=LimitsConfig(),
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            context=max_model_len,
            max_logprobs=20,
            eos_ids=(),
            has_tokenizer=True,
            processor_pattern="p",
            processors={"p": lambda arguments: None},
        )
        self.requests: list[Generate] = []
        self.calls: list[HttpStats] = []
        self.open = 0  # requests whose iterator was neither exhausted nor closed
        self.failure: BaseException | None = None  # raised after the first output
        self.refusal: FerruleError | None = None  # raised by `admit`
        self.defaults: dict[str, Any] = {}
        self.notes: tuple[str, ...] = ()  # of every prompt that is read
        self.loaded: dict[str, ServedAdapter] = {}
        self.pace: Callable[[], Any] = lambda: asyncio.sleep(0)

    async def resolve(self, model: str | None) -> str:
        if model and model not in (*self.names, *self.loaded):
            raise NotFoundError(f"There is no such model; served are: {', '.join(self.names)}.", "model")
        return model or self.names[0]

    def adapters(self) -> list[ServedAdapter]:
        return list(self.loaded.values())

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        self.loaded[name] = ServedAdapter(name=name, parent=self.names[0], path=path)

    async def unload_adapter(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            raise NotFoundError("There is no such adapter.", "lora_name")

    def sampling_defaults(self) -> dict[str, Any]:
        return dict(self.defaults)

    async def tokenize(self, prompt: Prompt | ChatPrompt) -> list[int]:
        return list(self._ids(prompt))

    async def read(self, prompt: Prompt | ChatPrompt) -> ReadPrompt:
        return ReadPrompt(self._ids(prompt), notes=self.notes)

    async def detokenize(self, ids: Sequence[int]) -> str:
        if any(not 0 <= token < VOCAB for token in ids):
            raise RequestError("tokens holds an id out of range.", "tokens")
        return "".join(map(chr, ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    async def admit(self, request: Generate) -> Admitted:
        try:
            return await self._admit(request)
        except RequestError as error:
            raise error.about(request.spelt(error.param)) from error

    async def _admit(self, request: Generate) -> Admitted:
        if self.refusal is not None:
            raise self.refusal
        model = await self.resolve(request.model)
        checked = check_params(request.params, self.rules)
        check_processors(request.logits_processors, self.rules)
        if request.beam is not None:
            check_beam(request.beam, request, checked, self.rules)
        prompts = []
        for prompt in request.prompts:
            ids = fit(checked, self._ids(prompt), self.rules, "prompt")[0]
            text = None if isinstance(prompt, Prompt) and prompt.text is None else "".join(map(chr, ids))
            prompts.append(ReadPrompt(ids, text, self.notes))
        self.requests.append(request)
        return Admitted(
            model=model if model in self.loaded else self.names[0],
            prompts=tuple(prompts),
            stream=_Outputs(self, request, prompts),
        )

    async def pool(self, request: Pool) -> list[Pooled]:
        """Return vectors that count how often each of the first four letters is in the prompt."""
        await self.resolve(request.model)
        found = [self._ids(prompt) for prompt in request.prompts]
        return [Pooled(vector=tuple(float(ids.count(ord(a))) for a in "abcd"), prompt_ids=ids) for ids in found]

    def _ids(self, prompt: Prompt | ChatPrompt) -> tuple[int, ...]:
        if isinstance(prompt, ChatPrompt):
            return tuple(ord(char) for message in prompt.messages for char in str(message.get("content", "")))
        ids = prompt.ids if prompt.ids is not None else tuple(map(ord, prompt.text or ""))
        return check_ids(ids, self.rules, "prompt")

    def health(self) -> Health:
        return Health(state=self.state)

    async def call(self, name: str, *args: Any) -> Any:
        return [name, *args]

    def answered(self, stats: HttpStats) -> None:
        self.calls.append(stats)

    def exposition(self) -> tuple[str, str]:
        return "text/plain; version=0.0.4; charset=utf-8", "vllm:num_requests_running 0\n"


class _Outputs(Outputs):
    """All choices' outputs, interleaved. Counts as open until it ends or is closed."""

    def __init__(self, service: ScriptedService, request: Generate, prompts: list[ReadPrompt]) -> None:
        self._service = service
        self._queue = _interleave(service, request, prompts)
        self._sent = 0
        self._closed = False
        service.open += 1

    async def __anext__(self) -> Output:
        if self._service.failure is not None and self._sent:
            await self.aclose()
            raise self._service.failure
        if self._closed or self._sent == len(self._queue):
            await self.aclose()
            raise StopAsyncIteration
        await self._service.pace()
        self._sent += 1
        return self._queue[self._sent - 1]

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._service.open -= 1


def _interleave(service: ScriptedService, request: Generate, prompts: list[ReadPrompt]) -> list[Output]:
    rows = []
    for index in range(len(prompts) * request.params.n):
        ids = prompts[index // request.params.n].ids
        scripted = service.script(request, index, ids)
        outputs, called = list[Output](), False
        for output in scripted:
            called = called or any(isinstance(event, CallStart) for event in output.events)
            param = request.spelt(output.param)
            outputs.append(replace(output, first=not outputs, called_tools=called, param=param))
        logprobs = None
        if request.params.prompt_logprobs is not None:
            logprobs = (None, *(TokenLogprobs(token, -1.0, 2, ((65, -0.1),)) for token in ids[1:]))
        outputs[0] = replace(outputs[0], prompt_logprobs=logprobs)
        rows.append(outputs)
    longest = max(map(len, rows))
    return [row[place] for place in range(longest) for row in rows if place < len(row)]
