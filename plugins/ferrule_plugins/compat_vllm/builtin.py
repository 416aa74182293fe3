"""Stand-ins for those of vLLM's own parsers that other parsers derive from and that Ferrule has too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, TextDelta
from ferrule_parsing import TaggedJsonParser
from ferrule_plugins.compat_vllm.bases import ReasoningParser, ToolParser
from ferrule_plugins.compat_vllm.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)


class Hermes2ProToolParser(ToolParser):
    """A parser of calls written as JSON objects between two tags, which a derived class may change.

    The text between the tags is read as by Ferrule's parser `hermes`.
    """

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self.tool_call_start_token = "<tool_call>"
        self.tool_call_end_token = "</tool_call>"
        self._reading: TaggedJsonParser | None = None

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        parser = self._made()
        message = self._message([*parser.feed(TextDelta(model_output)), *parser.finish()])
        calls = {
            call.index: ToolCall(id=call.id or "", function=FunctionCall(name=call.function.name or ""))
            for call in message.tool_calls
            if call.function is not None and call.function.name
        }
        for call in message.tool_calls:
            calls[call.index].function.arguments += (call.function and call.function.arguments) or ""
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=list(calls.values()), content=message.content
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        if self._reading is None:
            self._reading = self._made()
        return self._told(self._reading.feed(TextDelta(delta_text)))

    def end_of_stream(self) -> DeltaMessage | None:
        return None if self._reading is None else self._told(self._reading.finish())

    def _made(self) -> TaggedJsonParser:
        tags = {"open_tag": self.tool_call_start_token, "close_tag": self.tool_call_end_token}
        kind: type[TaggedJsonParser] = type("Tagged", (TaggedJsonParser,), tags)
        return kind([])

    def _told(self, events: Sequence[Event]) -> DeltaMessage | None:
        """Return the message of some events, and note what vLLM's parsers remember of a message."""
        message = self._message(events)
        for call in message.tool_calls:
            if call.function is None:
                continue
            if call.function.name:
                self.current_tool_id = call.index
                self.prev_tool_call_arr.append({"name": call.function.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
            self.prev_tool_call_arr[call.index]["arguments"] += call.function.arguments or ""
            self.streamed_args_for_tool[call.index] += call.function.arguments or ""
        return message if events else None

    def _message(self, events: Iterable[Event]) -> DeltaMessage:
        message, content = DeltaMessage(), ""
        for event in events:
            match event:
                case Content(text):
                    content += text
                case CallStart(index, id, name):
                    function = DeltaFunctionCall(name=name)
                    message.tool_calls.append(DeltaToolCall(id=id, type="function", index=index, function=function))
                case CallArguments(index, fragment):
                    arguments = DeltaFunctionCall(arguments=fragment)
                    message.tool_calls.append(DeltaToolCall(index=index, function=arguments))
                case CallEnd():
                    pass
        message.content = content or None
        return message


class BaseThinkingReasoningParser(ReasoningParser):
    """Thoughts between two tokens, `start_token` and `end_token`."""

    start_token: str
    end_token: str

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.start_token_id = self.vocab.get(self.start_token)
        self.end_token_id = self.vocab.get(self.end_token)
        if self.start_token_id is None or self.end_token_id is None:
            raise RuntimeError(f"the tokenizer has no token {self.start_token} or {self.end_token}")

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        marks = [token for token in input_ids if token in (self.start_token_id, self.end_token_id)]
        return bool(marks) and marks[-1] == self.end_token_id

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return self.end_token_id in set(delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        if self.end_token_id not in input_ids:
            return []
        return list(input_ids[input_ids.index(self.end_token_id) + 1 :])

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Count the tokens between the two tags, or before the second one when the first is missing."""
        ids = list(token_ids)
        end = ids.index(self.end_token_id) if self.end_token_id in ids else len(ids)
        return end - (ids.index(self.start_token_id) + 1 if self.start_token_id in ids[:end] else 0)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        reasoning, content = self._split(model_output)
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        before, now = self._split(previous_text), self._split(current_text)
        reasoning, content = (new[len(old) :] for old, new in zip(before, now, strict=True))
        if not reasoning and not content:
            return None
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    extract_reasoning_content = extract_reasoning
    extract_reasoning_content_streaming = extract_reasoning_streaming

    def _split(self, text: str) -> tuple[str, str]:
        reasoning, _, content = text.partition(self.end_token)
        return reasoning.replace(self.start_token, "", 1), content


class DeepSeekR1ReasoningParser(BaseThinkingReasoningParser):
    """A parser for which everything is reasoning until ``</think>``."""

    start_token = "<think>"
    end_token = "</think>"


class Qwen3ReasoningParser(BaseThinkingReasoningParser):
    """``<think>…</think>`` and the answer; without the first tag, in the prompt or in the answer, all is content."""

    start_token = "<think>"
    end_token = "</think>"

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._opened = False

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        marks = [token for token in prompt_token_ids if token in (self.start_token_id, self.end_token_id)]
        self._opened = bool(marks) and marks[-1] == self.start_token_id

    def _split(self, text: str) -> tuple[str, str]:
        inside = self._opened or text.lstrip().startswith(self.start_token)
        return super()._split(text) if inside else ("", text)


class IdentityReasoningParser(ReasoningParser):
    """A parser for which everything is content."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return True

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        return None, model_output

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        return DeltaMessage(content=delta_text) if delta_text else None

    extract_reasoning_content = extract_reasoning
    extract_reasoning_content_streaming = extract_reasoning_streaming
