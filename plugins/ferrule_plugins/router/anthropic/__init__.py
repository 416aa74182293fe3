"""`anthropic`: Anthropic's Messages, and the number of tokens that a conversation has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from msgspec.structs import replace

from ferrule import log
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
from ferrule.interfaces.service import ChatPrompt, Generate
from ferrule.sampling_params import SamplingParams
from ferrule.schema import check_marks
from ferrule_plugins.router.anthropic.answers import Message, MessageEvent, TokenCount
from ferrule_plugins.router.anthropic.conversation import (
    choice_of,
    continues,
    conversation,
    functions,
    parallel_calls,
)
from ferrule_plugins.router.anthropic.form import MessageForm, events
from ferrule_plugins.router.anthropic.schema import CountBody, MessagesBody, ThinkingOff, ThinkingOn
from ferrule_protocol import (
    Closing,
    Notes,
    TemplateFields,
    check_tool_choice,
    extended,
    unread_by_template,
)

_logger = log.get("anthropic")

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch thoughts
_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "structured_outputs": "output_config.format",
}


class Messages(Dialect):
    """The dialect of Anthropic's API: named events, errors with one of its types, and the key in `x-api-key`."""

    paths = ("/v1/messages/",)
    key_headers = ("x-api-key",)
    id_header = "request-id"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    last = b""
    error_schema = {
        "description": "Every error, whatever its status, has this form.",
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string", "description": "What is wrong, and what would be right."},
                },
            },
            "request_id": {"type": ["string", "null"], "description": "As in the header `request-id`."},
        },
    }

    def error(self, failure: Failure) -> dict[str, Any]:
        other = "api_error" if failure.status >= 500 else "invalid_request_error"
        error = {"type": _TYPES.get(failure.status, other), "message": failure.message}
        return {"type": "error", "error": error, "request_id": failure.request_id or None}

    def event(self, content: dict[str, Any]) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), encode(content))


class Anthropic(Router):
    def dialect(self, ctx: RouterContext) -> Dialect:
        return Messages()

    def router(self, ctx: RouterContext) -> APIRouter:
        routes = APIRouter(tags=["anthropic"])
        handler = _Handler(ctx)

        @routes.post(
            "/v1/messages",
            dependencies=[needs(Access.KEY, room=True)],
            response_model=Message,
            responses=streams(MessageEvent),
            summary="Answer a conversation, as Anthropic's API does.",
        )
        async def messages(body: MessagesBody, info: CurrentRequest) -> JSON | EventStream:
            return await handler.answer(body, info)

        @routes.post(
            "/v1/messages/count_tokens",
            response_model=TokenCount,
            summary="The number of tokens that a conversation has as a prompt.",
        )
        async def count_tokens(body: CountBody, info: CurrentRequest) -> JSON:
            return await handler.count(body, info)

        return routes


class _Handler:
    """The handlers of both routes."""

    def __init__(self, ctx: RouterContext) -> None:
        self._service = ctx.service
        self._config = ctx.config

    async def count(self, body: CountBody, info: RequestInfo) -> JSON:
        prompt, notes = await self._read(body, info)
        read = await (await self._service.tokens(body.model)).read(prompt)
        found: TokenCount = {"input_tokens": len(read.ids)}
        if (extension := extended(notes.extension, read.notes)) is not None:
            found["ferrule"] = extension
        return JSON(found, headers=notes.headers)

    async def answer(self, body: MessagesBody, info: RequestInfo) -> JSON | EventStream:
        prompt, notes = await self._read(body, info)
        name = f"msg_{info.id}"
        admitted = await self._service.admit(replace(await self._request(body, prompt), answer_id=name))
        user = body.metadata.user_id if body.metadata is not None else None
        if user is not None and not self._config.frontend.disable_log_requests:
            _logger.info("request notes", id=name, user_id=user)
        extension = extended(notes.extension, admitted.prompts[0].notes)
        form = MessageForm(name, admitted.model, parallel_calls(body.tool_choice), extension)
        if body.stream:
            outputs = admitted.outputs()
            return EventStream(Closing(events(form, outputs), outputs), notes.headers)
        return JSON(form.whole(await admitted.answer()), headers=notes.headers)

    async def _read(self, body: CountBody, info: RequestInfo) -> tuple[ChatPrompt, Notes]:
        """Return the prompt of a body, and notes on the fields without effect. Raises RequestError."""
        frontend = self._config.frontend
        await self._service.resolve(body.model)  # of two mistakes, an unknown model is reported
        messages, tools, choice = conversation(body), functions(body.tools), choice_of(body.tool_choice)
        check_tool_choice(tools, choice, self._config)
        if choice not in (None, "auto", "none") and _grammar_of(body) is not None:
            raise RequestError(
                "output_config.format cannot be combined with a tool_choice of any or tool: both say what the output "
                "looks like.",
                "output_config.format",
            )
        shown = choice != "none" or not frontend.exclude_tools_when_tool_choice_none
        switches, last = _switches(body), continues(body)
        prompt = ChatPrompt(
            messages=tuple(messages),
            tools=tuple(tools) if tools and shown else None,
            chat_template_kwargs=switches,
            add_generation_prompt=not last,
            continue_final_message=last,
        )
        notes = Notes.of(info.unknown_fields, type(body))
        notes.known += check_marks(body)
        if isinstance(body.thinking, ThinkingOn) and not frontend.reasoning_parser:
            notes.known.append(("thinking.budget_tokens", "no reasoning parser runs here."))
        others: dict[str, tuple[str, ...]] = {"thinking": _SWITCHES} if body.thinking is not None else {}
        if "reasoning_effort" in switches:
            others["output_config.effort"] = ("reasoning_effort",)
        fields = TemplateFields(tools=tools)
        notes.known += unread_by_template(messages, fields, self._service, choice != "none", others)
        notes.settle(frontend.strict_requests)
        return prompt, notes

    async def _request(self, body: MessagesBody, prompt: ChatPrompt) -> Generate:
        service = self._service
        longest = (await service.tokens(body.model)).max_model_len
        given = {
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "stop": body.stop_sequences,
        }
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        own["max_tokens"] = body.max_tokens if body.max_tokens < longest else None  # None: what the context has left
        if isinstance(body.thinking, ThinkingOn) and self._config.frontend.reasoning_parser:
            own["thinking_token_budget"] = body.thinking.budget_tokens
        return Generate(
            prompts=(prompt,),
            params=SamplingParams(**{**service.sampling_defaults(), **own}),
            model=body.model,
            grammar=_grammar_of(body),
            tools=prompt.tools,
            tool_choice=choice_of(body.tool_choice),
            parallel_tool_calls=parallel_calls(body.tool_choice),
            streamed=body.stream,
            names=_NAMES,
        )


def _grammar_of(body: CountBody) -> GrammarSpec | None:
    """Return the form of the answer that a body demands."""
    if body.output_config is None or body.output_config.format is None:
        return None
    return GrammarSpec(form=Json(body.output_config.format.schema_))


def _switches(body: CountBody) -> dict[str, Any]:
    """Return the variables of the template that a body sets: thoughts are off unless it asks for them."""
    on = body.thinking is not None and not isinstance(body.thinking, ThinkingOff)
    found: dict[str, Any] = dict.fromkeys(_SWITCHES, on)
    if body.output_config is not None and body.output_config.effort is not None:
        found["reasoning_effort"] = body.output_config.effort
    return found
