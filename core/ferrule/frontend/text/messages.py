"""Conversations as clients send them, checked and brought into the one form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ferrule.errors import RequestError

_MAX_ROLE = 64  # characters
_MAX_PIECES = 16_384  # messages, parts and tool calls: more cannot be meant

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "template",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names of chat_template_kwargs that would replace what the server itself passes to a template or a renderer."""


def read_messages(messages: Sequence[Any], max_characters: int) -> list[dict[str, Any]]:
    """Messages with a role, content (a text, or a list of text parts) and tool calls whose arguments are objects.

    Other keys pass through: templates read what they know. Raises RequestError naming the message.
    """
    if not messages:
        raise RequestError("messages must not be empty.", "messages")
    pieces, characters = _extent(messages)
    if pieces > _MAX_PIECES:
        raise RequestError(f"There may be at most {_MAX_PIECES} messages, parts and tool calls in all.", "messages")
    if characters > max_characters:
        raise RequestError(
            f"The conversation has {characters} characters; at most {max_characters} can fit this model's context.",
            "messages",
        )
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _extent(messages: Sequence[Any]) -> tuple[int, int]:
    """(messages, parts and tool calls; characters of what will be read of them), before anything is checked."""
    pieces, texts = len(messages), []
    if pieces > _MAX_PIECES:
        return pieces, 0
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list | tuple):
            pieces += len(content)
            texts += [part.get("text") if isinstance(part, Mapping) else part for part in content[:_MAX_PIECES]]
        else:
            texts.append(content)
        if isinstance(calls, list | tuple):
            pieces += len(calls)
            functions = [call.get("function") for call in calls[:_MAX_PIECES] if isinstance(call, Mapping)]
            texts += [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return pieces, sum(len(text) for text in texts if isinstance(text, str))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object.", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE:
        raise RequestError(f"{where}.role must be a text of 1 to {_MAX_ROLE} characters.", "messages")
    read = {str(key): value for key, value in message.items() if value is not None}
    read["content"] = _content(message.get("content"), f"{where}.content")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str):  # clients and templates use either name
        read["reasoning_content"] = read["reasoning"] = reasoning
    if "tool_calls" in read:
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{where}.tool_calls")
    return read


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} must be a text or a list of parts.", "messages")
    return [_part(part, f"{where}[{number}]") for number, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type.", "messages")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        named = f"{kind!r:.60}" if isinstance(kind, str) else "none"
        raise RequestError(f"{where}: this model takes parts of type 'text' only, not {named}.", "messages")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a text.", "messages")
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} must be a list.", "messages")
    read = []
    for number, call in enumerate(calls):
        here = f"{where}[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{here}.function must have a name.", "messages")
        arguments = _arguments(function.get("arguments"), f"{here}.function.arguments")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _arguments(arguments: Any, where: str) -> Any:
    """The OpenAI form is a JSON text; templates want the object."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise RequestError(f"{where} must be a JSON text.", "messages") from None
