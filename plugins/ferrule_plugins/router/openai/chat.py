"""``POST /v1/chat/completions``: from a body to a request, and from outputs to chunks or to a whole answer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ferrule.config import RouterSettings
from ferrule.errors import RequestError
from ferrule.interfaces.parsers import CallArguments, CallStart, Event
from ferrule.interfaces.router import JSON, CurrentRequest, EventStream, RouterContext
from ferrule.interfaces.service import Answer, Generate, Output, ReadPrompt, ToolCall
from ferrule.structured_outputs import constraint_of
from ferrule.types import FinishReason, TokenLogprobs
from ferrule_plugins.router.openai.answers import ChatChoice, ChatCompletionMessage, ChatLogprob, ChatToolCall
from ferrule_plugins.router.openai.form import Asked, Form, respond
from ferrule_plugins.router.openai.params import EFFORT, check, common, echo_of, role_of
from ferrule_plugins.router.openai.schema import ChatBody, NamedTool
from ferrule_protocol import chat_prompt, check_tool_choice, extended, finite, sampling, spelling


class Chat:
    """The handler of chat completions."""

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    async def chat(self, body: ChatBody, info: CurrentRequest) -> JSON | EventStream:
        config = self._ctx.config
        check(body, config)
        _check(body, config)
        request = self._request(body)
        asked, admitted = await Asked.admit("chatcmpl", body, info, request, self._ctx)
        form = ChatForm(body, asked, admitted.prompts[0], config.frontend.response_role)
        return await respond(form, admitted, body.stream)

    def _request(self, body: ChatBody) -> Generate:
        service, frontend = self._ctx.service, self._ctx.config.frontend
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most = getattr(body, limit)
        if most is None:
            most = service.sampling_defaults().get("max_tokens")  # else what is left of the context
        prompt = chat_prompt(body.messages, body)
        if body.reasoning_effort is not None:  # the request's own arguments of the template win
            derived = zip(EFFORT, (body.reasoning_effort, body.reasoning_effort != "none"), strict=True)
            prompt = replace(prompt, chat_template_kwargs={**dict(derived), **(body.chat_template_kwargs or {})})
        if body.tool_choice == "none" and frontend.exclude_tools_when_tool_choice_none:
            prompt = replace(prompt, tools=None)
        given: dict[str, Any] = {
            "extra_args": body.vllm_xargs,
            "max_tokens": most,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        return Generate(
            prompts=(prompt,),
            params=sampling(body, service, given),
            tools=prompt.tools,
            tool_choice=_choice(body),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            thought_tokens=body.include_reasoning,
            stop_in_reasoning=body.stop_in_reasoning,
            names=spelling(body, logprobs="top_logprobs", max_tokens=limit),
            **common(body),
        )


def _check(body: ChatBody, config: RouterSettings) -> None:
    """Refuse fields of a chat that do not go together, or that this server cannot serve."""
    choice = body.tool_choice
    if body.tools is not None and choice not in (None, "auto", "none") and (field := constraint_of(body)):
        raise RequestError(
            f"{field} cannot be combined with a tool_choice other than auto and none: both say what the output looks "
            "like.",
            field,
        )
    check_tool_choice(body.tools, _choice(body), config)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    most = config.max_logprobs
    if body.top_logprobs and most >= 0 and not 0 < body.top_logprobs <= most:
        raise RequestError(f"top_logprobs must be between 0 and {most}.", "top_logprobs")


def _choice(body: ChatBody) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


class ChatForm(Form):
    """The form of one request's answer."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, asked: Asked, prompt: ReadPrompt, response_role: str) -> None:
        super().__init__(asked, extended(asked.notes.extension, prompt.notes))
        self._role = role_of(body, response_role)
        self._echo = echo_of(body, self._role)
        self._reasoning = body.include_reasoning
        self._named = isinstance(body.tool_choice, NamedTool)  # then the end is "stop", as OpenAI's
        self._many_calls = body.parallel_tool_calls is not False
        self._with_logprobs = body.logprobs
        if asked.token_ids:
            self.head["prompt_token_ids"] = list(prompt.ids)
        if body.return_prompt_text and prompt.text is not None:
            self.head["prompt_text"] = prompt.text

    def chunk(self, output: Output) -> list[dict[str, Any]]:
        """Return at most two chunks: the beginning of the choice, and what is new in it."""
        chunks = []
        if output.first:
            begin: ChatChoice = {
                "index": output.index,
                "delta": {"role": self._role, "content": self._echo},
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            }
            chunks.append(self.chunk_of(begin, output))
        delta: ChatCompletionMessage = {}
        if text := output.text:
            delta["content"] = text
        self._add_reasoning(delta, output)
        calls = [call for call in map(_call_delta, output.events) if call and self._shows(call["index"])]
        if calls:
            delta["tool_calls"] = calls
        choice = self._choice(output)
        choice["delta"] = delta
        if delta or choice["finish_reason"] is not None or choice["logprobs"] or choice.get("token_ids"):
            chunks.append(self.chunk_of(choice, output))
        return chunks

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the whole answer, with the log-probabilities of the prompt, which streams do not have."""
        whole, found = super().whole(answer), answer.choices[0].prompt_logprobs
        return whole if found is None else whole | {"prompt_logprobs": self.asked.prompt_logprobs(found)}

    def choice(self, output: Output) -> ChatChoice:
        content = self._echo + output.text
        message: ChatCompletionMessage = {"role": self._role, "content": content}
        self._add_reasoning(message, output)
        calls = [_whole_call(call) for number, call in enumerate(output.calls) if self._shows(number)]
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        choice = self._choice(output)
        choice["message"] = message
        return choice

    def _choice(self, output: Output) -> ChatChoice:
        """Return the fields that chunks and whole answers have in common."""
        choice: ChatChoice = {
            "index": output.index,
            "logprobs": None,
            "finish_reason": None if output.finish is None else output.finish.value,
            "stop_reason": output.stop_reason,
        }
        if output.called_tools and output.finish is FinishReason.STOP and not self._named:
            choice["finish_reason"] = "tool_calls"
        if self._with_logprobs and output.logprobs:
            choice["logprobs"] = {"content": [self._logprob(entry) for entry in output.logprobs]}
        if self.asked.token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def _add_reasoning(self, message: ChatCompletionMessage, output: Output) -> None:
        reasoning = output.reasoning if self._reasoning else ""
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning

    def _shows(self, number: int) -> bool:
        return self._many_calls or number == 0

    def _logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        asked = self.asked
        spell = asked.tokens.token_bytes
        return {
            "token": asked.token(entry.token_id),
            "logprob": finite(entry.logprob),
            "bytes": list(spell(entry.token_id)),
            "top_logprobs": [
                {"token": asked.token(token_id), "logprob": finite(logprob), "bytes": list(spell(token_id))}
                for token_id, logprob in entry.top
            ],
        }


def _call_delta(event: Event) -> ChatToolCall | None:
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


def _whole_call(call: ToolCall) -> ChatToolCall:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
