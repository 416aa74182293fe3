"""The translation of a conversation in Ollama's form to the one that chat templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrule_plugins.router.ollama.schema import GenerateFields, OllamaMessage, OllamaMessageCall

_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch thoughts


def conversation(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages as chat messages, one for one.

    Ollama's calls and results name functions, where templates may want ids: calls without an id get one that depends on
    their place only, so that the prompts of a conversation begin alike. A result that names no call is that of the
    first call of its function that waits for one, else of the first call that does. A result without a call is passed
    on: the template decides about it.
    """
    found: list[dict[str, Any]] = []
    waiting: dict[str, str] = {}  # calls without a result: id → function
    num_calls = 0
    for message in messages:
        if message.role == "tool":
            found.append(_result(message, waiting))
            continue
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            made["thinking"] = message.thinking
        if message.tool_calls:
            calls = [_call(call, number) for number, call in enumerate(message.tool_calls, num_calls)]
            num_calls += len(calls)
            waiting = {call["id"]: call["function"]["name"] for call in calls}
            made |= {"content": message.content or None, "tool_calls": calls}
        found.append(made)
    return found


def continues(messages: Sequence[OllamaMessage]) -> bool:
    """Return whether the answer is to continue the last message, which is a text of the assistant's."""
    return messages[-1].role == "assistant" and bool(messages[-1].content) and not messages[-1].tool_calls


def variables(body: GenerateFields) -> dict[str, Any]:
    """Return the variables of the template that a body sets; none where it does not say whether to think."""
    if body.think is None:
        return {}
    found: dict[str, Any] = dict.fromkeys(_SWITCHES, body.think is not False)
    return found | {"reasoning_effort": body.think} if isinstance(body.think, str) else found


def _call(call: OllamaMessageCall, number: int) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or f"call{number:05}", "type": "function", "function": function}


def _result(message: OllamaMessage, waiting: dict[str, str]) -> dict[str, Any]:
    """Return the message of a result, and take its call out of `waiting`."""
    call_id = message.tool_call_id or _called(message.tool_name, waiting)
    name = waiting.pop(call_id, "") if call_id else ""
    made: dict[str, Any] = {"role": "tool", "content": message.content}
    if call_id:
        made["tool_call_id"] = call_id
    if told := message.tool_name or name:
        made["name"] = told
    return made


def _called(name: str | None, waiting: Mapping[str, str]) -> str | None:
    same = (call_id for call_id, function in waiting.items() if function == name)
    return next(same, next(iter(waiting), None))
