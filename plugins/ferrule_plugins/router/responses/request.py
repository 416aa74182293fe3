"""From a body of the Responses routes to a request: its prompt, its parameters, and what the response repeats of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ferrule.config import RouterSettings
from ferrule.errors import RequestError
from ferrule.forms import GrammarSpec, Json
from ferrule.interfaces.router import RequestInfo, RouterContext
from ferrule.interfaces.service import ChatPrompt, Generate, Service
from ferrule.sampling_params import SamplingParams
from ferrule.schema import check_marks
from ferrule_plugins.router.openai.params import EFFORT
from ferrule_plugins.router.responses.answers import Response
from ferrule_plugins.router.responses.conversation import Placed, conversation, cuts
from ferrule_plugins.router.responses.schema import (
    ENCRYPTED,
    LOGPROBS,
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    JsonObjectText,
    JsonSchemaText,
    ResponsesBody,
    TokensBody,
)
from ferrule_protocol import Extension, Notes, TemplateFields, check_tool_choice, unread_by_template

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_LEFT_FOR_ANSWER = 8  # with truncation auto and no limit, this part of the context is left for the answer


class Reading:
    """A body as the server reads it: which tools count, whether calls are demanded, and the notes on its fields.

    Raises RequestError for fields that do not go together.
    """

    def __init__(self, body: TokensBody, info: RequestInfo, ctx: RouterContext) -> None:
        self._body, self._config, self._service = body, ctx.config, ctx.service
        self.choice = _choice(body)
        self.tools = _functions(body)
        check_tool_choice(self.tools, self.choice, self._config)
        self.grammar = grammar_of(body)
        if self.tools and self.choice not in (None, "auto", "none") and self.grammar is not None:
            raise RequestError(
                "text.format cannot be combined with a tool_choice that demands calls: both say what the output looks "
                "like.",
                "text.format",
            )
        self.switches = _switches(body)
        self.notes = Notes.of(info.unknown_fields, type(body))
        self.notes.known += _marks(body)
        if isinstance(body, ResponsesBody):
            check(body, self._config)
            self.notes.known += _idle(body)
        self._note_tools()

    def prompt(self, items: Sequence[Placed]) -> ChatPrompt:
        """Return the prompt of these items. Raises RequestError."""
        shown = self.choice != "none" or not self._config.frontend.exclude_tools_when_tool_choice_none
        return ChatPrompt(
            messages=tuple(conversation(self._body.instructions, items)),
            tools=tuple(self.tools) if self.tools and shown else None,
            chat_template_kwargs=self.switches or None,
        )

    async def fitting(self, items: Sequence[Placed]) -> ChatPrompt:
        """Return the prompt of as many of the last items as fit. Raises RequestError where no part of them fits."""
        tokens = await self._service.tokens(self._body.model)
        longest = tokens.max_model_len
        most = getattr(self._body, "max_output_tokens", None) or max(1, longest // _LEFT_FOR_ANSWER)
        most += sum(one.num_virtual for one in self._service.adapters() if one.name == self._body.model)
        places = [0, *cuts(items)]

        async def fits(place: int) -> bool:
            try:
                read = await tokens.read(self.prompt(items[place:]))
            except RequestError:  # it has more characters than the context can hold; a real fault is found at the end
                return False
            return len(read.ids) + most <= longest

        low, high = 0, len(places) - 1  # what is dropped before the last place always
        while low < high:
            middle = (low + high) // 2
            if await fits(places[middle]):
                high = middle
            else:
                low = middle + 1
        if dropped := places[low]:
            self.notes.known.append(("truncation", f"the {dropped} oldest items were dropped."))
        return self.prompt(items[places[low] :])

    def settle(self, prompt: ChatPrompt) -> None:
        """Add what the template does not show, and log or refuse what has no effect. Raises RequestError."""
        others: dict[str, tuple[str, ...]] = {}
        if "verbosity" in self.switches:
            others["text.verbosity"] = ("verbosity",)
        if EFFORT[0] in self.switches:
            others["reasoning.effort"] = EFFORT
        fields = TemplateFields(tools=self.tools)
        shows = self.choice != "none"
        self.notes.known += unread_by_template(prompt.messages, fields, self._service, shows, others)
        self.notes.settle(self._config.frontend.strict_requests)

    def _note_tools(self) -> None:
        if self._body.parallel_tool_calls is not None and not self.tools:
            self.notes.known.append(("parallel_tool_calls", "has an effect with tools only."))
        if self.choice in (None, "auto") and not self._service.enforces_strict_tools():
            self.notes.known += [
                (
                    f"tools[{number}].strict",
                    "the tool parser of this server cannot enforce arguments where the model chooses to call.",
                )
                for number, tool in enumerate(self._body.tools or ())
                if tool.strict
            ][:1]


def check(body: ResponsesBody, config: RouterSettings) -> None:
    """Refuse fields that do not go together, or that this server cannot serve."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    if body.background and not body.store:
        raise RequestError("background needs store to be true: there is no other way to read the answer.", "background")
    if body.priority and config.scheduler.scheduling_policy == "fcfs":
        raise RequestError("priority needs a server started with --scheduling-policy priority.", "priority")
    if body.structured_outputs is not None and _format_of(body) is not None:
        raise RequestError(
            "structured_outputs cannot be combined with text.format: both say what the output looks like.",
            "structured_outputs",
        )
    most = config.max_logprobs
    if body.top_logprobs and most >= 0 and not 0 < body.top_logprobs <= most:
        raise RequestError(f"top_logprobs must be between 0 and {most}.", "top_logprobs")


def generate(body: ResponsesBody, prompt: ChatPrompt, reading: Reading, service: Service) -> Generate:
    """Return the request to generate."""
    own = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    most = body.max_output_tokens
    own["max_tokens"] = service.sampling_defaults().get("max_tokens") if most is None else most
    if LOGPROBS in (body.include or ()):
        own["logprobs"] = body.top_logprobs or 0
    field = "text.format" if body.structured_outputs is None else "structured_outputs"
    return Generate(
        prompts=(replace(prompt, tools=prompt.tools),),
        params=SamplingParams(**{**service.sampling_defaults(), **own}),
        model=body.model,
        priority=body.priority,
        cache_salt=body.cache_salt,
        grammar=reading.grammar,
        tools=prompt.tools,
        tool_choice=reading.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thought_tokens=False,
        streamed=body.stream,
        names={"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "structured_outputs": field},
    )


def head(body: ResponsesBody, request: Generate, response_id: str, model: str, extension: Extension | None) -> Response:
    """Return the fields of a response that do not change while it is generated."""
    params, reasoning = request.params, body.reasoning
    found: Any = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": _text_of(body),
        "tool_choice": _shown_choice(body),
        "tools": [_shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }
    if extension is not None:
        found["ferrule"] = extension
    response: Response = found
    return response


def grammar_of(body: TokensBody) -> GrammarSpec | None:
    """Return the form of the answer that a body demands."""
    if isinstance(body, ResponsesBody) and body.structured_outputs is not None:
        return body.structured_outputs.spec()
    match _format_of(body):
        case JsonSchemaText(schema_=schema):
            return GrammarSpec(form=Json(schema))
        case JsonObjectText():
            return GrammarSpec(form=Json({"type": "object"}))
    return None


def _format_of(body: TokensBody) -> JsonSchemaText | JsonObjectText | None:
    form = body.text and body.text.format
    return form if isinstance(form, JsonSchemaText | JsonObjectText) else None


def _choice(body: TokensBody) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode if isinstance(choice, AllowedTools) else choice


def _functions(body: TokensBody) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call, as functions; None when there are none. Raises RequestError."""
    tools = body.tools or []
    if isinstance(body.tool_choice, AllowedTools):
        names = {tool.name for tool in tools}
        for number, allowed in enumerate(body.tool_choice.tools):
            if allowed.name not in names:
                where = f"tool_choice.tools[{number}].name"
                raise RequestError(f"{where} names {allowed.name!r:.80}, which is not one of the tools.", where)
        allowed_names = {allowed.name for allowed in body.tool_choice.tools}
        tools = [tool for tool in tools if tool.name in allowed_names]
    return [{"type": "function", "function": _function(tool)} for tool in tools] or None


def _function(tool: FunctionTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {name: value for name, value in given.items() if value is not None}


def _switches(body: TokensBody) -> dict[str, Any]:
    """Return the variables of the template that a body sets."""
    found: dict[str, Any] = {}
    effort = body.reasoning and body.reasoning.effort
    if effort:
        found |= dict(zip(EFFORT, (effort, effort != "none"), strict=True))
    if body.text is not None and body.text.verbosity is not None:
        found["verbosity"] = body.text.verbosity
    return found


def _marks(body: TokensBody) -> list[tuple[str, str]]:
    """Return the marked fields of a body and of the objects in it. Raises RequestError for a missing feature."""
    notes = check_marks(body)
    for name in ("reasoning", "stream_options"):
        if (part := getattr(body, name, None)) is not None:
            notes += [(f"{name}.{field}", why) for field, why in check_marks(part)]
    return notes


def _idle(body: ResponsesBody) -> list[tuple[str, str]]:
    """Return the fields that change nothing as this body has them."""
    include = body.include or ()
    notes = [
        ("include", f"{each} is about hosted tools and images, of which there are none.")
        for each in dict.fromkeys(include)
        if each not in (LOGPROBS, ENCRYPTED)
    ]
    if body.top_logprobs and LOGPROBS not in include:
        notes.append(("top_logprobs", f"has an effect with include {LOGPROBS} only."))
    return notes


def _text_of(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else None
    found: dict[str, Any] = {"format": form or {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        found["verbosity"] = body.text.verbosity
    return found


def _shown_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    return "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump()


def _shown_tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
