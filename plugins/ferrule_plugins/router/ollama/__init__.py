"""`ollama`: Ollama's API, for its clients: chat, generate, embeddings, and the served models.

There is one model, which is loaded when the server starts. So routes that load, fetch, make and delete models are not
there, and what asks for a model to be loaded or unloaded is answered and has no effect. Defaults of sampling are the
model's, as on all routes, and not Ollama's. `/api/version` tells the version of Ollama whose protocol is spoken,
because clients look there for what a server can do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from msgspec.structs import replace

from ferrule import __version__
from ferrule.errors import RequestError
from ferrule.forms import GrammarSpec, Json
from ferrule.interfaces.dialect import Dialect, Failure, encode
from ferrule.interfaces.router import (
    JSON,
    Access,
    CurrentRequest,
    EventStream,
    RequestInfo,
    Router,
    RouterContext,
    needs,
    streams,
)
from ferrule.interfaces.service import Admitted, ChatPrompt, Generate, Pool, Prompt
from ferrule.sampling_params import SamplingParams
from ferrule.schema import check_marks
from ferrule_plugins.router.ollama.answers import (
    OllamaChatAnswer,
    OllamaEmbedded,
    OllamaEmbedding,
    OllamaGenerateAnswer,
    OllamaListedModels,
    OllamaRunningModels,
    OllamaShownModel,
    OllamaVersion,
)
from ferrule_plugins.router.ollama.conversation import continues, conversation, variables
from ferrule_plugins.router.ollama.form import ChatForm, Form, GenerateForm, Seen, events, now
from ferrule_plugins.router.ollama.models import Models
from ferrule_plugins.router.ollama.schema import (
    GenerateFields,
    ModelBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaOptions,
    OllamaShowBody,
)
from ferrule_protocol import Closing, Extension, Notes, TemplateFields, extended, unread_by_template

SPOKEN = "0.12.11"  # the version of Ollama whose protocol this is

_ONE_MODEL = "The server has one model, which is loaded when it starts: ferrule serve MODEL."
_ABSENT: Mapping[str, str] = {
    "/api/pull": f"Models are not fetched by requests. {_ONE_MODEL}",
    "/api/push": f"Models are not sent to other servers. {_ONE_MODEL}",
    "/api/create": f"Models are not made by requests. {_ONE_MODEL}",
    "/api/copy": "Models are not copied; --served-model-name gives the model several names.",
    "/api/delete": f"Models are not deleted by requests. {_ONE_MODEL}",
    "/api/blobs/": f"This server stores no files. {_ONE_MODEL}",
    "/api/": "Of Ollama's API there are chat, generate, embed, embeddings, tags, ps, show and version.",
}
_CHARACTERS = 16  # per token of the context: a service tokenizes no longer texts
_OPTIONS = {"repetition_penalty": "repeat_penalty"}  # sampling parameters that Ollama has under another name
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_NAMES = {
    **{name: f"options.{_OPTIONS.get(name, name)}" for name in _SAMPLING},
    "structured_outputs": "format",
    "logprobs": "top_logprobs",
}


class LinesOfJson(Dialect):
    """The dialect of Ollama's API: streams are lines of JSON, and an error is a text."""

    paths = ("/api/",)
    body_types = ("application/x-www-form-urlencoded",)  # what curl sends in the examples of Ollama's pages
    media_type = "application/x-ndjson"
    ping = b""
    last = b""
    error_schema = {
        "description": "Every error, whatever its status, has this form.",
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "What is wrong, and what would be right."}},
    }

    def error(self, failure: Failure) -> dict[str, Any]:
        return {"error": failure.message}

    def event(self, content: Any) -> bytes:
        return encode(content) + b"\n"


class Ollama(Router):
    def dialect(self, ctx: RouterContext) -> Dialect:
        return LinesOfJson()

    def absent(self, ctx: RouterContext) -> Mapping[str, str]:
        return _ABSENT

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["ollama"])
        _add_answers(routes, ctx)
        _add_models(routes, ctx)
        return routes


def _add_answers(routes: APIRouter, ctx: RouterContext) -> None:
    """Add the routes that use the model."""
    handler = _Handler(ctx)
    queued = [needs(Access.KEY, room=True)]

    @routes.post(
        "/api/chat",
        dependencies=queued,
        response_model=OllamaChatAnswer,
        responses=streams(OllamaChatAnswer),
        summary="Answer a conversation, as Ollama does.",
    )
    async def chat(body: OllamaChatBody, info: CurrentRequest) -> JSON | EventStream:
        return await handler.chat(body, info)

    @routes.post(
        "/api/generate",
        dependencies=queued,
        response_model=OllamaGenerateAnswer,
        responses=streams(OllamaGenerateAnswer),
        summary="Answer a prompt, as Ollama does.",
    )
    async def generate(body: OllamaGenerateBody, info: CurrentRequest) -> JSON | EventStream:
        return await handler.generate(body, info)

    @routes.post("/api/embed", dependencies=queued, response_model=OllamaEmbedded, summary="The vectors of texts.")
    async def embed(body: OllamaEmbedBody, info: CurrentRequest) -> JSON:
        return await handler.embed(body, info)

    @routes.post(
        "/api/embeddings", dependencies=queued, response_model=OllamaEmbedding, summary="The vector of a text."
    )
    async def embeddings(body: OllamaEmbeddingsBody, info: CurrentRequest) -> JSON:
        return await handler.embeddings(body, info)


def _add_models(routes: APIRouter, ctx: RouterContext) -> None:
    """Add the routes that tell of the server and its models."""
    models = Models(ctx)

    @routes.get("/", response_class=PlainTextResponse, summary="A text by which Ollama's clients know a server.")
    async def running() -> str:
        return "Ollama is running"

    @routes.get("/api/version", summary="The version of the protocol, and the server's.")
    async def version() -> OllamaVersion:
        return {"version": SPOKEN, "ferrule": __version__}

    @routes.get("/api/tags", summary="The served models, as Ollama lists them.")
    async def tags() -> OllamaListedModels:
        return {"models": models.listed()}

    @routes.get("/api/ps", summary="The models that are loaded: all.")
    async def ps() -> OllamaRunningModels:
        return {"models": models.running()}

    @routes.post("/api/show", response_model=OllamaShownModel, summary="A description of a model.")
    async def show(body: OllamaShowBody, info: CurrentRequest) -> JSON:
        if (name := body.model or body.name) is None:
            raise RequestError("model is required.", "model")
        notes = Notes.of(info.unknown_fields, OllamaShowBody)
        notes.known += check_marks(body)
        notes.settle(ctx.config.frontend.strict_requests)
        return JSON({**await models.shown(await models.resolve(name)), **_told(notes.extension)}, headers=notes.headers)


class _Handler:
    """The handlers of the routes that use the model."""

    def __init__(self, ctx: RouterContext) -> None:
        self._service = ctx.service
        self._config = ctx.config
        self._models = Models(ctx)

    async def chat(self, body: OllamaChatBody, info: RequestInfo) -> JSON | EventStream:
        began, model, notes = time.perf_counter_ns(), await self._models.resolve(body.model), self._notes(body, info)
        if not body.messages:
            notes.settle(self._config.frontend.strict_requests)
            said = {"message": {"role": "assistant", "content": ""}}
            return _loaded(model, said, body, notes)
        if body.tools and not self._config.frontend.enable_auto_tool_choice:
            raise RequestError(
                "tools need a server that was started with --enable-auto-tool-choice and --tool-call-parser.", "tools"
            )
        messages = conversation(body.messages)
        prompt = self._conversation(messages, body, notes, last=continues(body.messages))
        admitted = await self._service.admit(await self._request(body, model, prompt))
        form = ChatForm(admitted, self._service, began, extended(notes.extension, admitted.prompts[0].notes))
        return await _answer(form, admitted, body, notes)

    async def generate(self, body: OllamaGenerateBody, info: RequestInfo) -> JSON | EventStream:
        began, model, notes = time.perf_counter_ns(), await self._models.resolve(body.model), self._notes(body, info)
        written = body.raw or bool(body.suffix)  # by the client, and not by a template
        if body.raw and (body.system or body.context):
            name = "system" if body.system else "context"
            raise RequestError(f"{name} cannot be combined with raw: the prompt is all that the model sees.", name)
        if not body.prompt:
            notes.settle(self._config.frontend.strict_requests)
            return _loaded(model, {"response": ""}, body, notes)
        told: tuple[str, ...] = ()
        if written or not self._models.has_template:
            prompt: Prompt | ChatPrompt = self._written(body, notes)
        else:
            system = [{"role": "system", "content": body.system}] if body.system else []
            messages = [*system, {"role": "user", "content": body.prompt}]
            prompt = self._conversation(messages, body, notes)
            if body.context:
                prompt, told = await self._following(body.context, prompt, model)
        request = await self._request(body, model, prompt)
        admitted = await self._service.admit(replace(request, raw=written) if written else request)
        read = admitted.prompts[0]
        extension = extended(notes.extension, (*told, *read.notes))
        form = GenerateForm(admitted, self._service, began, extension, None if written else read.ids)
        return await _answer(form, admitted, body, notes)

    async def embed(self, body: OllamaEmbedBody, info: RequestInfo) -> JSON:
        began, model, notes = time.perf_counter_ns(), await self._models.resolve(body.model), self._notes(body, info)
        notes.settle(self._config.frontend.strict_requests)
        texts = [body.input] if isinstance(body.input, str) else body.input
        prompts = [await self._cut(text, model) if body.truncate else Prompt(text=text) for text in texts]
        pooled = await self._service.pool(Pool(prompts=tuple(prompts), normalize=True, model=model)) if prompts else []
        answer: OllamaEmbedded = {
            "model": model,
            "embeddings": [_shortened(one.vector, body.dimensions) for one in pooled],
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": sum(len(one.prompt_ids) for one in pooled),
        }
        return JSON({**answer, **_told(notes.extension)}, headers=notes.headers)

    async def embeddings(self, body: OllamaEmbeddingsBody, info: RequestInfo) -> JSON:
        model, notes = await self._models.resolve(body.model), self._notes(body, info)
        notes.settle(self._config.frontend.strict_requests)
        vector: Sequence[float] = ()
        if body.prompt:
            (one,) = await self._service.pool(Pool(prompts=(await self._cut(body.prompt, model),), model=model))
            vector = one.vector
        return JSON({"embedding": list(vector), **_told(notes.extension)}, headers=notes.headers)

    # ---------------------------------------------------------------------------------------- prompts

    def _conversation(
        self, messages: list[dict[str, Any]], body: GenerateFields, notes: Notes, *, last: bool = False
    ) -> ChatPrompt:
        """Return the prompt of a conversation, whose `last` message may go on, and settle the notes on it."""
        sets, tools = variables(body), getattr(body, "tools", None)
        others = {"think": tuple(sets)} if sets else {}
        notes.known += unread_by_template(messages, TemplateFields(tools=tools), self._service, True, others)
        notes.settle(self._config.frontend.strict_requests)
        return ChatPrompt(
            messages=tuple(messages),
            tools=tuple(tools) if tools else None,
            chat_template_kwargs=sets or None,
            add_generation_prompt=not last,
            continue_final_message=last,
        )

    def _written(self, body: OllamaGenerateBody, notes: Notes) -> Prompt:
        """Return a prompt without a template, and settle the notes on it."""
        why = "has no effect with raw" if body.raw else "has no effect with suffix"
        if not (body.raw or body.suffix):
            why = "has no effect: the model has no chat template"
        notes.known += [
            (name, f"{why}.")
            for name in ("system", "think", "context")
            if getattr(body, name) not in (None, "", [], False)
        ]
        notes.settle(self._config.frontend.strict_requests)
        return Prompt(text=body.prompt, suffix=body.suffix or None)

    async def _following(
        self, context: Sequence[int], prompt: ChatPrompt, model: str
    ) -> tuple[Prompt, tuple[str, ...]]:
        """Return the ids of an earlier conversation and of a prompt that follows it, with notes on the prompt."""
        tokens = await self._service.tokens(model)
        if not 0 <= min(context) <= max(context) < tokens.vocab_size:
            raise RequestError(f"context holds a token id that is not in [0, {tokens.vocab_size}).", "context")
        read = await tokens.read(prompt)
        tokenizer = tokens.tokenizer
        begins = tokenizer is not None and read.ids[:1] == (tokenizer.bos_token_id,)
        return Prompt(ids=(*context, *read.ids[begins:])), read.notes

    async def _cut(self, text: str, model: str) -> Prompt:
        """Return the beginning of a text that fits the context. The token that ends every text, if any, stays."""
        tokens = await self._service.tokens(model)
        most, tokenizer = tokens.max_model_len, tokens.tokenizer
        ids = await tokens.tokenize(Prompt(text=text[: most * _CHARACTERS]))
        if len(ids) > most and tokenizer is not None and ids[-1] in tokenizer.all_special_ids:
            return Prompt(ids=(*ids[: most - 1], ids[-1]))
        return Prompt(ids=tuple(ids[:most]))

    # ---------------------------------------------------------------------------------------- parameters

    def _notes(self, body: ModelBody, info: RequestInfo) -> Notes:
        """Return the notes on the fields of any body. Raises RequestError for a feature that is missing."""
        notes = Notes.of(info.unknown_fields, type(body))
        notes.known += check_marks(body)
        if isinstance(body.options, OllamaOptions):
            notes.known += [(f"options.{name}", why) for name, why in check_marks(body.options)]
        if isinstance(body, GenerateFields):
            if body.top_logprobs and not body.logprobs:
                notes.known.append(("top_logprobs", "has an effect with logprobs only."))
            if body.think and not self._config.frontend.reasoning_parser:
                notes.known.append(("think", "no reasoning parser runs here, so thoughts are part of the text."))
        return notes

    async def _request(self, body: GenerateFields, model: str, prompt: Prompt | ChatPrompt) -> Generate:
        service, options = self._service, body.options or OllamaOptions()
        longest = (await service.tokens(model)).max_model_len
        given = {name: getattr(options, _OPTIONS.get(name, name)) for name in _SAMPLING}
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        defaults = service.sampling_defaults()
        most = defaults.get("max_tokens") if options.num_predict is None else options.num_predict
        own["max_tokens"] = most if most is not None and 0 < most < longest else None
        own["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
        return Generate(
            prompts=(prompt,),
            params=SamplingParams(**{**defaults, **own}),
            model=model,
            grammar=_grammar_of(body),
            tools=tools,
            streamed=body.stream,
            names=_NAMES,
        )


def _grammar_of(body: GenerateFields) -> GrammarSpec | None:
    """Return the form of the answer that a body demands."""
    if not body.format and body.format != {}:
        return None
    return GrammarSpec(form=Json({"type": "object"} if body.format == "json" else body.format))


async def _answer(form: Form, admitted: Admitted, body: GenerateFields, notes: Notes) -> JSON | EventStream:
    """Answer a request that was admitted, as a stream or as a whole."""
    outputs = admitted.outputs()
    if body.stream:
        return EventStream(Closing(events(form, outputs), outputs), notes.headers)
    answer = await replace(admitted, stream=Seen(form, outputs)).answer()
    if body.logprobs:  # there may be very many of them: other requests go on meanwhile
        return JSON(await asyncio.to_thread(form.whole, answer), headers=notes.headers)
    return JSON(form.whole(answer), headers=notes.headers)


def _loaded(model: str, said: dict[str, Any], body: ModelBody, notes: Notes) -> JSON:
    """Answer a request that asks for nothing but that the model be loaded, or unloaded."""
    reason = "unload" if body.keep_alive == 0 else "load"
    line = {"model": model, "created_at": now(), **said, "done": True, "done_reason": reason}
    return JSON(line | _told(notes.extension), headers=notes.headers)


def _told(extension: Extension | None) -> dict[str, Any]:
    return {} if extension is None else {"ferrule": extension}


def _shortened(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """Return the first numbers of a vector of length 1, as a vector of length 1."""
    if not dimensions or dimensions >= len(vector):
        return list(vector)
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]
