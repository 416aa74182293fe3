"""``POST /v1/chat/completions``: outputs become chunks; a whole answer is the fold of the chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from msgspec.structs import replace

from ferrule.config import RouterSettings
from ferrule.errors import RequestError, nearest
from ferrule.interfaces.parsers import CallArguments, CallStart, Content, Event, Reasoning
from ferrule.interfaces.router import JSON, EventStream, RequestInfo, RouterContext
from ferrule.interfaces.service import Generate, Output, ReadPrompt
from ferrule.structured_outputs import constraint_of, grammar_of
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    Message,
    ToolCall,
    UsageInfo,
)
from ferrule_plugins.router.openai_fields import EFFORT, echo_of, role_of
from ferrule_plugins.router.openai_params import Asked, beam, check, finish_of, processors, targets, usage_of
from ferrule_plugins.router.openai_schema import ChatBody, NamedTool
from ferrule_protocol import Closing, Meter, chat_prompt, extended, finite, sampling, spelling


class Chat:
    """The handler."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def __call__(self, body: ChatBody, info: RequestInfo) -> JSON | EventStream:
        config = self._ctx.config
        check(body, config)
        _check_tools(body, config)
        _check_logprobs(body, config)
        request = self._request(body)
        asked, admitted = await Asked.admit("chatcmpl", body, info, request, self._ctx)
        writer = _Writer(body, asked, admitted.prompts[0], config.frontend.response_role)
        outputs = admitted.outputs()
        if body.stream:
            return EventStream(Closing(writer.chunks(outputs), outputs), asked.notes.headers)
        async with aclosing(outputs):
            return JSON(await writer.whole(outputs), headers=asked.notes.headers)

    def _request(self, body: ChatBody) -> Generate:
        service, frontend = self._ctx.service, self._ctx.config.frontend
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most = getattr(body, limit)
        if most is None:
            most = service.sampling_defaults().get("max_tokens")  # else what is left of the context
        prompt = replace(chat_prompt(body.messages, body), chat_template_kwargs=_template_kwargs(body))
        if body.tool_choice == "none" and frontend.exclude_tools_when_tool_choice_none:
            prompt = replace(prompt, tools=None)
        given: dict[str, Any] = {
            "extra_args": body.vllm_xargs,
            "max_tokens": most,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        choice = body.tool_choice
        return Generate(
            prompts=(prompt,),
            params=sampling(body, service, given),
            model=body.model,
            priority=body.priority,
            targets=targets(body),
            cache_salt=body.cache_salt,
            grammar=grammar_of(body),
            logits_processors=processors(body),
            tools=prompt.tools,
            tool_choice=choice.model_dump() if isinstance(choice, NamedTool) else choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            beam=beam(body),
            thought_tokens=body.include_reasoning,
            stop_in_reasoning=body.stop_in_reasoning,
            streamed=body.stream,
            names=spelling(body, logprobs="top_logprobs", max_tokens=limit),
        )


def _template_kwargs(body: ChatBody) -> dict[str, Any] | None:
    """Templates read `reasoning_effort`, or whether to think at all, under these names; the request's own win."""
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs
    derived = dict(zip(EFFORT, (effort, effort != "none"), strict=True))
    return {**derived, **(body.chat_template_kwargs or {})}


def _check_logprobs(body: ChatBody, config: RouterSettings) -> None:
    if not body.top_logprobs:
        return
    if not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    most = config.max_logprobs
    if most >= 0 and not 0 < body.top_logprobs <= most:
        raise RequestError(f"top_logprobs must be between 0 and {most}.", "top_logprobs")


def _check_tools(body: ChatBody, config: RouterSettings) -> None:
    choice = body.tool_choice
    if body.tools is None:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools.", "tool_choice")
    elif choice in (None, "auto"):
        if not config.frontend.enable_auto_tool_choice:
            raise RequestError(
                'tool_choice "auto", the default with tools, needs a server that was started with '
                '--enable-auto-tool-choice and --tool-call-parser; with "none" the tools are only shown to the model.',
                "tool_choice",
            )
    elif choice != "none" and (field := constraint_of(body)):
        raise RequestError(
            f"{field} cannot be combined with a tool_choice other than auto and none: both say what the output looks "
            "like.",
            field,
        )
    elif isinstance(choice, NamedTool):
        names = [tool["function"]["name"] for tool in body.tools]
        if choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name!r:.80}, which is not one of the tools."
                f"{nearest(choice.function.name, names)}",
                "tool_choice",
            )


class _Writer:
    """From outputs to chunks, for one request."""

    def __init__(self, body: ChatBody, asked: Asked, prompt: ReadPrompt, response_role: str) -> None:
        options, count = body.stream_options, asked.num_per_prompt
        self._role = role_of(body, response_role)
        self._echo = echo_of(body, self._role)
        self._asked = asked
        self._count = count
        self._reasoning = body.include_reasoning
        self._named = isinstance(body.tool_choice, NamedTool)  # then the end is "stop", as OpenAI's
        self._many_calls = body.parallel_tool_calls is not False
        self._with_logprobs = body.logprobs
        self._include_usage = options is not None and bool(options.include_usage)
        self._each_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._meter = Meter(count, asked.num_per_prompt)
        self._begun = [False] * count
        self._called = [False] * count
        self._prompt: dict[str, Any] = {}  # what a whole answer, or a stream's first chunk, says about the prompt
        if asked.token_ids:
            self._prompt["prompt_token_ids"] = list(prompt.ids)
        if body.return_prompt_text and prompt.text is not None:
            self._prompt["prompt_text"] = prompt.text
        self._extension = extended(asked.notes.extension, prompt.notes)  # for the first chunk

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[ChatCompletion]:
        async for output in outputs:
            for choice in self._choices(output):
                usage = usage_of(self._meter.of(output.index)) if self._each_usage else None
                yield self._answer("chat.completion.chunk", [choice], usage)
        if self._include_usage:
            yield self._answer("chat.completion.chunk", [], self._asked.usage(self._meter.total()))

    async def whole(self, outputs: AsyncIterator[Output]) -> ChatCompletion:
        choices = [_whole_choice(index, self._role) for index in range(self._count)]
        async for output in outputs:
            for piece in self._choices(output):
                _fold(choices[piece["index"]], piece)
        answer = self._answer("chat.completion", choices, None)
        answer["usage"] = self._asked.usage(self._meter.total())
        return answer

    def _answer(
        self,
        kind: Literal["chat.completion", "chat.completion.chunk"],
        choices: list[ChatChoice],
        usage: UsageInfo | None,
    ) -> ChatCompletion:
        asked = self._asked
        answer: ChatCompletion = {
            "id": asked.id,
            "object": kind,
            "created": asked.created,
            "model": asked.model,
            "choices": choices,
            "system_fingerprint": asked.fingerprint,
        }
        if self._include_usage:
            answer["usage"] = usage
        if self._extension is not None:
            answer["ferrule"] = self._extension
            self._extension = None
        if self._prompt:
            answer.update(self._prompt)  # type: ignore[typeddict-item]
            self._prompt.clear()
        return answer

    def _choices(self, output: Output) -> list[ChatChoice]:
        """What one output adds to its choice, in the form of chunks; at most a beginning and a piece."""
        self._meter.see(output)
        index = output.index
        finish = finish_of(output)
        pieces = []
        if not self._begun[index]:
            self._begun[index] = True
            pieces.append(_piece(index, {"role": self._role, "content": self._echo}))
        piece = _piece(index, self._delta(index, output.events))
        piece["finish_reason"] = finish
        if output.prompt_logprobs is not None:
            self._prompt.setdefault("prompt_logprobs", self._asked.prompt_logprobs(output.prompt_logprobs))
        if finish is not None:
            piece["stop_reason"] = output.stop_reason
            if self._called[index] and output.finish is FinishReason.STOP and not self._named:
                piece["finish_reason"] = "tool_calls"
        if self._with_logprobs and output.logprobs:
            piece["logprobs"] = {"content": [self._logprob(entry) for entry in output.logprobs]}
        if self._asked.token_ids:
            piece["token_ids"] = list(output.token_ids)
        if piece["delta"] or finish is not None or piece["logprobs"] or piece.get("token_ids"):
            pieces.append(piece)
        return pieces

    def _delta(self, index: int, events: tuple[Event, ...]) -> Message:
        delta: Message = {}
        content = "".join(event.text for event in events if isinstance(event, Content))
        if content:
            delta["content"] = content
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) if self._reasoning else ""
        if reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        calls = [call for call in map(_call_delta, events) if call and (self._many_calls or call["index"] == 0)]
        if calls:
            self._called[index] = True
            delta["tool_calls"] = calls
        return delta

    def _logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        asked = self._asked
        spell = asked.service.token_bytes
        return {
            "token": asked.token(entry.token_id),
            "logprob": finite(entry.logprob),
            "bytes": list(spell(entry.token_id)),
            "top_logprobs": [
                {"token": asked.token(token_id), "logprob": finite(logprob), "bytes": list(spell(token_id))}
                for token_id, logprob in entry.top
            ],
        }


def _piece(index: int, delta: Message) -> ChatChoice:
    """A chunk's choice."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _whole_choice(index: int, role: str) -> ChatChoice:
    message: Message = {"role": role, "content": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _call_delta(event: Event) -> ToolCall | None:
    if isinstance(event, CallStart):
        return {
            "index": event.index,
            "id": event.id,
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }
    if isinstance(event, CallArguments):
        return {"index": event.index, "function": {"arguments": event.fragment}}
    return None


def _fold(choice: ChatChoice, piece: ChatChoice) -> None:
    """Add a chunk's choice to the whole one."""
    message, delta = choice["message"], piece["delta"]
    if "content" in delta:
        message["content"] = (message["content"] or "") + (delta["content"] or "")
    if "reasoning" in delta:
        message["reasoning_content"] = message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
    for call in delta.get("tool_calls", ()):
        _fold_call(message, call)
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    if piece["logprobs"] is not None:
        whole = choice["logprobs"] = choice["logprobs"] or {"content": []}
        whole["content"].extend(piece["logprobs"]["content"])
    if "token_ids" in piece:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    if piece["finish_reason"] is not None:
        choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]


def _fold_call(message: Message, call: ToolCall) -> None:
    calls = message.setdefault("tool_calls", []) if "id" in call else message.get("tool_calls", [])
    if "id" in call:
        name = call["function"]["name"]
        calls.append({"id": call["id"], "type": call["type"], "function": {"name": name, "arguments": ""}})
    if calls:
        calls[-1]["function"]["arguments"] += call["function"]["arguments"]
