"""The translation of a conversation in Anthropic's form to the one that chat templates know; signatures of thoughts.

A message of blocks may become several: each result of a call is a message of the role `tool`. Messages of one role that
follow each other are one turn.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ferrule.errors import RequestError
from ferrule_plugins.router.anthropic.schema import (
    AnyChoice,
    AssistantBlock,
    AssistantMessage,
    AutoChoice,
    CountBody,
    NamedChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    UserMessage,
)

_SIGNED = b"ferrule thinking 1\n"  # before the thoughts; another form of signatures gets another number
_CHOICES: Mapping[type, str] = {AutoChoice: "auto", AnyChoice: "required"}

_Placed = tuple[str, Any]  # a block, after its path in the body


def signature_of(thoughts: str) -> str:
    """Return the signature of thoughts: a digest, which proves that they come back unchanged, not who wrote them.

    It needs no secret, so it is the same in all API processes and after a restart.
    """
    digest = hashlib.sha256(_SIGNED + thoughts.encode("utf-8", "surrogatepass")).digest()
    return base64.b64encode(b"\x01" + digest).decode("ascii")


def conversation(body: CountBody) -> list[dict[str, Any]]:
    """Return the system prompt and the messages as chat messages. Raises RequestError that names a block."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _content(_texts(body.system))})
    open_calls: Sequence[str] = ()
    for assistant, turn in groupby(enumerate(body.messages), lambda placed: isinstance(placed[1], AssistantMessage)):
        blocks = [block for number, message in turn for block in _blocks(message, f"messages[{number}].content")]
        if assistant:
            found.append(_assistant(blocks))
            open_calls = [block.id for _, block in blocks if isinstance(block, ToolUseBlock)]
        else:
            found += _user(blocks, open_calls)
            open_calls = ()
    if open_calls:
        raise _unanswered(open_calls, f"messages[{len(body.messages) - 1}].content")
    return found


def continues(body: CountBody) -> bool:
    """Return whether the answer is to continue the last message, which is the assistant's."""
    return isinstance(body.messages[-1], AssistantMessage)


def functions(tools: Sequence[ToolParam] | None) -> list[dict[str, Any]] | None:
    """Return tools as functions; None when there are none."""
    return [{"type": "function", "function": _function(tool)} for tool in tools or ()] or None


def choice_of(choice: ToolChoiceParam | None) -> str | dict[str, Any] | None:
    """Return the choice of tools as `Generate.tool_choice` has it."""
    if choice is None:
        return None
    if isinstance(choice, NamedChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES.get(type(choice), "none")


def parallel_calls(choice: ToolChoiceParam | None) -> bool:
    """Return whether an answer may have several calls."""
    return not getattr(choice, "disable_parallel_tool_use", False)


def _function(tool: ToolParam) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        found["description"] = tool.description
    found["parameters"] = tool.input_schema
    return found if tool.strict is None else found | {"strict": tool.strict}


def _blocks(message: UserMessage | AssistantMessage, where: str) -> Iterator[_Placed]:
    if isinstance(message.content, str):
        yield where, TextBlock(type="text", text=message.content)
        return
    blocks: Sequence[UserBlock | AssistantBlock] = message.content
    yield from ((f"{where}[{number}]", block) for number, block in enumerate(blocks))


def _texts(content: str | Sequence[TextBlock]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return one text as it is, several as parts: the template, or the server for it, joins these as everywhere."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _assistant(blocks: Sequence[_Placed]) -> dict[str, Any]:
    """Return the assistant's turn as one message. Its texts are joined as they are: they are one text with calls or
    thoughts between.
    """
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                if block.signature != signature_of(block.thinking):
                    raise RequestError(
                        f"{where}.signature does not fit the thoughts: send thinking blocks back as they came.",
                        f"{where}.signature",
                    )
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                raise RequestError(
                    f"{where}.data is not valid: this server makes no redacted_thinking blocks.", f"{where}.data"
                )
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _user(blocks: Sequence[_Placed], open_calls: Sequence[str]) -> list[dict[str, Any]]:
    """Return the user's turn: a message for each result, and one for the texts, if there are any."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    waiting = dict.fromkeys(open_calls)
    for where, block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif texts:
            raise RequestError(f"{where}: results of calls must come before the texts of a message.", where)
        else:
            found.append(_result(block, waiting, f"{where}.tool_use_id"))
    if waiting:
        raise _unanswered(list(waiting), blocks[0][0].partition(".")[0] if blocks else "messages")
    if texts or not found:
        found.append({"role": "user", "content": _content(texts)})
    return found


def _result(block: ToolResultBlock, waiting: dict[str, None], where: str) -> dict[str, Any]:
    """Return the message of a result, and take its call out of `waiting`."""
    call = block.tool_use_id
    if call not in waiting:
        raise RequestError(
            f"{where} names {call!r:.80}, which is not a tool_use block of the message before that waits for a result.",
            where,
        )
    del waiting[call]
    texts = _texts(block.content)
    if block.is_error:
        texts = ["Error: " + "".join(texts[:1]), *texts[1:]]
    return {"role": "tool", "tool_call_id": call, "content": _content(texts)}


def _unanswered(calls: Sequence[str], where: str) -> RequestError:
    return RequestError(
        f"{where}: the call {calls[0]!r:.80} needs a tool_result block in the message that follows it.", where
    )
