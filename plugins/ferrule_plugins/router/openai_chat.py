"""``POST /v1/chat/completions``: outputs become chunks; a whole answer is the fold of the chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from ferrule.config import Config
from ferrule.errors import RequestError
from ferrule.interfaces.parsers import CallArguments, CallStart, Content, Event, Reasoning
from ferrule.interfaces.router import Call, EventStream, Reply, RouterContext
from ferrule.interfaces.service import ChatPrompt, Generate, Output
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    FunctionCall,
    Message,
    ToolCall,
    TopLogprob,
)
from ferrule_plugins.router.openai_fields import echo_of, generation_prompt, role_of
from ferrule_plugins.router.openai_params import Asked, Meter, beam, check, finish_of, finite, processors, sampling
from ferrule_plugins.router.openai_schema import ChatBody
from ferrule_plugins.router.stream import Closing

_MAX_TOOLS = 1024
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Chat:
    """The handler."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def __call__(self, call: Call) -> Reply | EventStream:
        body: ChatBody = call.body
        config, service = self._ctx.config, self._ctx.service
        check(body, config)
        _check_tools(body, config)
        _check_logprobs(body, config)
        request = self._request(body)
        asked = Asked.of("chatcmpl", call, request, service, config)
        try:
            outputs = await service.generate(request)
        except RequestError as error:
            # The service knows the values under the names of SamplingParams.
            if error.param == "logprobs":
                error.param = "top_logprobs"
            elif error.param == "max_tokens" and body.max_completion_tokens is not None:
                error.param = "max_completion_tokens"
            raise
        writer = _Writer(body, asked, request.params.n, config.frontend.response_role)
        if body.stream:
            return EventStream(Closing(writer.chunks(outputs), outputs), asked.notes.headers)
        async with aclosing(outputs):  # type: ignore[type-var]
            return Reply(await writer.whole(outputs), headers=asked.notes.headers)

    def _request(self, body: ChatBody) -> Generate:
        service, frontend = self._ctx.service, self._ctx.config.frontend
        hidden = body.tool_choice == "none" and frontend.exclude_tools_when_tool_choice_none
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if most is None:
            most = service.sampling_defaults().get("max_tokens")  # else what is left of the context
        prompt = ChatPrompt(
            messages=tuple(body.messages),
            tools=None if body.tools is None or hidden else tuple(body.tools),
            documents=None if body.documents is None else tuple(body.documents),
            chat_template=body.chat_template,
            chat_template_kwargs=_template_kwargs(body),
            add_generation_prompt=generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
        )
        given = {"max_tokens": most, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
        return Generate(
            prompts=(prompt,),
            params=sampling(body, service, given),
            model=body.model,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            logits_processors=processors(body),
            tools=prompt.tools,
            tool_choice=body.tool_choice,
            beam=beam(body),
            streamed=bool(body.stream),
        )


def _template_kwargs(body: ChatBody) -> dict[str, Any] | None:
    """Templates read `reasoning_effort`, or whether to think at all, under these names; the request's own win."""
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs
    if effort not in _EFFORTS:
        raise RequestError(f"reasoning_effort must be one of {', '.join(_EFFORTS)}.", "reasoning_effort")
    derived = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**derived, **(body.chat_template_kwargs or {})}


def _check_logprobs(body: ChatBody, config: Config) -> None:
    if not body.top_logprobs:
        return
    if not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    most = config.model.max_logprobs
    if body.top_logprobs < (0 if most >= 0 else -1) or 0 <= most < body.top_logprobs:
        bound = f"between 0 and {most}" if most >= 0 else "0 or more, or -1 for all tokens"
        raise RequestError(f"top_logprobs must be {bound}.", "top_logprobs")


def _check_tools(body: ChatBody, config: Config) -> None:
    choice = body.tool_choice
    if body.tools is None:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools.", "tool_choice")
        return
    if not 0 < len(body.tools) <= _MAX_TOOLS:
        raise RequestError(f"tools must hold 1 to {_MAX_TOOLS} functions; leave it out instead of empty.", "tools")
    for place, tool in enumerate(body.tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(
                f"tools[{place}] must be {{'type': 'function', 'function': {{...}}}}.", f"tools[{place}]"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{place}].function.name is required.", f"tools[{place}].function.name")
    if choice in (None, "auto"):
        if not config.frontend.enable_auto_tool_choice:
            raise RequestError(
                'tool_choice "auto", the default with tools, needs a server that was started with '
                '--enable-auto-tool-choice and --tool-call-parser; with "none" the tools are only shown to the model.',
                "tool_choice",
            )
    elif choice == "required" or isinstance(choice, dict):
        raise RequestError(
            "tool_choice can be 'auto' or 'none' here: a call cannot be enforced, because this build has no guided "
            "decoding.",
            "tool_choice",
        )
    elif choice != "none":
        raise RequestError("tool_choice must be 'auto', 'none', 'required' or name a function.", "tool_choice")


class _Writer:
    """From outputs to chunks, for one request."""

    def __init__(self, body: ChatBody, asked: Asked, count: int, response_role: str) -> None:
        options = body.stream_options
        self._role = role_of(body, response_role)
        self._echo = echo_of(body, self._role)
        self._prompt_text = bool(body.return_prompt_text)
        self._asked = asked
        self._count = count
        self._reasoning = body.include_reasoning is not False
        self._many_calls = body.parallel_tool_calls is not False
        self._with_logprobs = bool(body.logprobs)
        self._include_usage = options is not None and bool(options.include_usage)
        self._each_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._meter = Meter(asked, count)
        self._begun = [False] * count
        self._called = [False] * count
        self._prompt: dict[str, Any] = {}  # what a whole answer, or a stream's first chunk, says about the prompt
        self._extension = asked.notes.extension  # for the first chunk

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[ChatCompletion]:
        async for output in outputs:
            for choice in self._choices(output):
                yield self._answer("chat.completion.chunk", [choice], self._each_usage and self._meter.of(output.index))
        if self._include_usage:
            yield self._answer("chat.completion.chunk", [], self._meter.total())

    async def whole(self, outputs: AsyncIterator[Output]) -> ChatCompletion:
        choices = [
            ChatChoice(index=index, message=Message(role=self._role, content=None)) for index in range(self._count)
        ]
        async for output in outputs:
            for piece in self._choices(output):
                _fold(choices[piece.index], piece)
        answer = self._answer("chat.completion", choices, None)
        answer.usage = self._meter.total()
        self._tell_prompt(answer)
        return answer

    def _answer(self, kind: str, choices: list[ChatChoice], usage: Any) -> ChatCompletion:
        asked = self._asked
        answer = ChatCompletion(
            id=asked.id,
            object=kind,
            created=asked.created,
            model=asked.model,
            choices=choices,
            system_fingerprint=asked.fingerprint,
            usage=(usage or None) if self._include_usage else UNSET,
            ferrule=self._extension,
        )
        self._extension = UNSET
        if kind == "chat.completion.chunk":
            self._tell_prompt(answer)
        return answer

    def _tell_prompt(self, answer: ChatCompletion) -> None:
        for name, value in self._prompt.items():
            setattr(answer, name, value)
        self._prompt.clear()

    def _choices(self, output: Output) -> list[ChatChoice]:
        """What one output adds to its choice, in the form of chunks; at most a beginning and a piece."""
        self._meter.see(output)
        index = output.index
        finish = finish_of(output)
        pieces = []
        if not self._begun[index]:
            self._begun[index] = True
            self._see_prompt(output)
            pieces.append(ChatChoice(index=index, delta=Message(role=self._role, content=self._echo)))
        piece = ChatChoice(index=index, delta=self._delta(index, output.events), finish_reason=finish)
        if output.prompt_logprobs is not None:
            self._prompt.setdefault("prompt_logprobs", self._asked.prompt_logprobs(output.prompt_logprobs))
        if finish is not None:
            piece.stop_reason = output.stop_reason
            if self._called[index] and output.finish is FinishReason.STOP:
                piece.finish_reason = "tool_calls"
        if self._with_logprobs and output.logprobs:
            piece.logprobs = ChatLogprobs([self._logprob(entry) for entry in output.logprobs])
        if self._asked.token_ids:
            piece.token_ids = list(output.token_ids)
        if piece.delta != Message() or finish is not None or piece.logprobs or piece.token_ids:
            pieces.append(piece)
        return pieces

    def _see_prompt(self, output: Output) -> None:
        if output.prompt_ids is None or output.index:
            return
        if self._asked.token_ids:
            self._prompt["prompt_token_ids"] = list(output.prompt_ids)
        if self._prompt_text and output.prompt_text is not None:
            self._prompt["prompt_text"] = output.prompt_text

    def _delta(self, index: int, events: tuple[Event, ...]) -> Message:
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) if self._reasoning else ""
        calls = [call for call in map(_call_delta, events) if call and (self._many_calls or call.index == 0)]
        self._called[index] = self._called[index] or bool(calls)
        return Message(
            content=content or UNSET,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def _logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        asked = self._asked
        spell = asked.service.token_bytes
        top = [
            TopLogprob(asked.token(token_id), finite(logprob), list(spell(token_id))) for token_id, logprob in entry.top
        ]
        return ChatLogprob(asked.token(entry.token_id), finite(entry.logprob), list(spell(entry.token_id)), top)


def _call_delta(event: Event) -> ToolCall | None:
    if isinstance(event, CallStart):
        return ToolCall(index=event.index, id=event.id, type="function", function=FunctionCall(name=event.name))
    if isinstance(event, CallArguments):
        return ToolCall(index=event.index, function=FunctionCall(arguments=event.fragment))
    return None


def _fold(choice: ChatChoice, piece: ChatChoice) -> None:
    """Add a chunk's choice to the whole one."""
    message, delta = choice.message, piece.delta
    if isinstance(message, Message) and isinstance(delta, Message):
        if delta.content is not UNSET:
            message.content = (message.content or "") + (delta.content or "")
        if delta.reasoning is not UNSET:
            message.reasoning = (message.reasoning or "") + delta.reasoning
            message.reasoning_content = message.reasoning
        for call in delta.tool_calls or ():
            _fold_call(message, call)
        if message.tool_calls and not message.content:
            message.content = None
    if piece.logprobs is not None:
        choice.logprobs = choice.logprobs or ChatLogprobs([])
        choice.logprobs.content.extend(piece.logprobs.content)
    if piece.token_ids is not UNSET:
        choice.token_ids = (choice.token_ids or []) + piece.token_ids
    if piece.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason


def _fold_call(message: Message, call: ToolCall) -> None:
    calls = message.tool_calls or []
    if call.id is not UNSET:
        calls.append(ToolCall(id=call.id, type=call.type, function=FunctionCall(name=call.function.name)))
    if calls:
        calls[-1].function.arguments += call.function.arguments
    message.tool_calls = calls or UNSET
