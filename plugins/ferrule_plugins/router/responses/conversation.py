"""The translation of items to the conversation that chat templates know, and thoughts in a form that clients send back.

Items have one normal form, a dict as OpenAI lists it, in stored responses and here. The assistant's items that follow
each other are one turn, as one answer of the model becomes several of them; only two messages in a row stay two.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any

from pydantic_core import from_json

from ferrule.errors import RequestError
from ferrule_plugins.router.responses.items import (
    CallItem,
    MessageItem,
    OutputTextPart,
    Part,
    ReasoningItem,
    RefusalPart,
    ResultItem,
)

_SIGNED = b"ferrule reasoning 1\n"  # before the thoughts; another form of contents gets another number
_VERSION = b"\x01"
_DIGEST_BYTES = 16
_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}

Placed = tuple[str, dict[str, Any]]  # an item, after its path in the body


# ------------------------------------------------------------------------------------------------ thoughts


def sealed(thoughts: str) -> str:
    """Return thoughts as `encrypted_content`: encoded, with a digest which proves that they come back unchanged.

    Nothing is secret: the item has the same thoughts in `content`. So it needs no key, and is valid in all API
    processes and after a restart.
    """
    text = thoughts.encode("utf-8", "surrogatepass")
    return base64.b64encode(_VERSION + _digest(text) + text).decode("ascii")


def opened(content: str) -> str:
    """Return the thoughts of an `encrypted_content`. Raises ValueError for one that `sealed` did not make."""
    data = base64.b64decode(content, validate=True)
    version, digest, text = data[:1], data[1 : 1 + _DIGEST_BYTES], data[1 + _DIGEST_BYTES :]
    if version != _VERSION or digest != _digest(text):
        raise ValueError("not made here, or changed")
    return text.decode("utf-8", "surrogatepass")


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(_SIGNED + text).digest()[:_DIGEST_BYTES]


# ------------------------------------------------------------------------------------------------ normal form


def item_id(kind: str, name: str, number: int | str) -> str:
    """Return the id of an item of the response ``resp_NAME``: `response_of` finds the response again."""
    return f"{_PREFIXES[kind]}_{name}_{number}"


def response_of(some_id: str) -> str | None:
    """Return the id of the response that an item's id tells; None for an id of another form."""
    name, _, number = some_id.partition("_")[2].rpartition("_")
    return f"resp_{name}" if name and number else None


def with_own_ids(items: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the input items of the response ``resp_NAME`` with an id each: clients turn pages of the list by ids, so
    an item whose id is empty, or that of another before it, gets a new one.
    """
    found: list[dict[str, Any]] = []
    sent, seen = {item["id"] for item in items}, set[str]()
    numbers = count()
    for item in items:
        own = item["id"]
        if not own or own in seen:
            own = next(new for number in numbers if (new := item_id(item["type"], name, f"i{number}")) not in sent)
        seen.add(own)
        found.append({**item, "id": own})
    return found


def message_item(text: str) -> dict[str, Any]:
    """Return a text of the user's as an item, without an id."""
    return _message("user", [{"type": "input_text", "text": text}], "")


def normal(item: MessageItem | ReasoningItem | CallItem | ResultItem) -> dict[str, Any]:
    """Return a client's item in the normal form. Its id is empty where the client gave none."""
    own = item.id or ""
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            return _message(item.role, [_part(kind, text) for text in _texts(item.content)], own)
        case ReasoningItem():
            found: dict[str, Any] = {"id": own, "type": "reasoning", "summary": [_plain(each) for each in item.summary]}
            if item.content is not None:
                found["content"] = [_plain(each) for each in item.content]
            if item.encrypted_content is not None:
                found["encrypted_content"] = item.encrypted_content
            return found | {"status": "completed"}
        case CallItem():
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {"id": own, "type": "function_call", **call, "status": "completed"}
        case ResultItem():
            output = item.output
            said = output if isinstance(output, str) else [_part("input_text", text) for text in _texts(output)]
            result = {"call_id": item.call_id, "output": said}
            return {"id": own, "type": "function_call_output", **result, "status": "completed"}


def _message(role: str, content: list[dict[str, Any]], own: str) -> dict[str, Any]:
    return {"id": own, "type": "message", "role": role, "content": content, "status": "completed"}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def _plain(part: Any) -> dict[str, Any]:
    return {"type": part.type, "text": part.text}


def _texts(content: str | Sequence[Part]) -> list[str]:
    return [content] if isinstance(content, str) else [_text(part) for part in content]


def _text(part: Part) -> str:
    if isinstance(part, RefusalPart):
        return part.refusal
    text: str = part.text if isinstance(part, OutputTextPart) else part.text
    return text


# ------------------------------------------------------------------------------------------------ conversations


def conversation(instructions: str | None, items: Sequence[Placed]) -> list[dict[str, Any]]:
    """Return instructions and items as chat messages. Raises RequestError that names an item."""
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    waiting: dict[str, str] = {}  # calls without a result so far, with their places
    for assistant, turn in groupby(items, _is_assistants):
        if assistant:
            found += _turn(list(turn), waiting)
        else:
            found += [_other(where, item, waiting) for where, item in turn]
    for call, where in waiting.items():
        raise RequestError(f"The call {call!r:.80} has no result: send a function_call_output for it.", where)
    return found


def cuts(items: Sequence[Placed]) -> Iterator[int]:
    """Yield the places before which items may be dropped, without half a turn or a result without its call."""
    waiting = set[str]()
    before = False
    for place, (_, item) in enumerate(items):
        assistant = _is_assistants(items[place])
        if place and not waiting and not (before and assistant):
            yield place
        before = assistant
        if item["type"] == "function_call":
            waiting.add(item["call_id"])
        elif item["type"] == "function_call_output":
            waiting.discard(item["call_id"])


def characters(item: Mapping[str, Any]) -> int:
    """Return the number of characters of an item's texts, which is a bound for the context's sake."""
    content = item.get("content") or ()
    output = item.get("output") or ""
    return (
        sum(len(part["text"]) for part in content)
        + (len(output) if isinstance(output, str) else sum(len(part["text"]) for part in output))
        + len(item.get("arguments") or "")
    )


def _is_assistants(placed: Placed) -> bool:
    item = placed[1]
    return item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant"


def _turn(items: Sequence[Placed], waiting: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the assistant's messages: one, and another for each message that follows a message directly."""
    begins = [
        place
        for place, (_, item) in enumerate(items)
        if place == 0 or item["type"] == items[place - 1][1]["type"] == "message"
    ]
    for first, last in zip(begins, [*begins[1:], len(items)], strict=True):
        yield _assistant(items[first:last], waiting)


def _assistant(items: Sequence[Placed], waiting: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, item in items:
        match item["type"]:
            case "message":
                texts += [part["text"] for part in item["content"]]
            case "reasoning":
                thoughts.append(_thoughts(where, item))
            case "function_call":
                if item["call_id"] in waiting:
                    told = f"{where}.call_id: another call has the id {item['call_id']!r:.80}, and no result so far."
                    raise RequestError(told, f"{where}.call_id")
                waiting[item["call_id"]] = where
                function = {"name": item["name"], "arguments": _arguments(item["arguments"], f"{where}.arguments")}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning"] = "".join(thoughts)
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _arguments(text: str, where: str) -> str:
    """Return the arguments of a call as a JSON text. The end may be missing, as of an answer that was cut off."""
    try:
        return json.dumps(from_json(text, allow_partial=True), ensure_ascii=False) if text.strip() else text
    except ValueError:
        raise RequestError(f"{where} must be a JSON text.", where) from None


def _thoughts(where: str, item: Mapping[str, Any]) -> str:
    sealed_content = item.get("encrypted_content")
    if sealed_content is None:
        return "".join(part["text"] for part in item.get("content") or ())
    try:
        return opened(sealed_content)
    except ValueError:
        raise RequestError(
            f"{where}.encrypted_content was not made by this server, or was changed: send reasoning items back as they "
            "came.",
            f"{where}.encrypted_content",
        ) from None


def _other(where: str, item: Mapping[str, Any], waiting: dict[str, str]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content([part["text"] for part in item["content"]])}
    call, output = item["call_id"], item["output"]
    if call not in waiting:
        raise RequestError(
            f"{where}.call_id names {call!r:.80}, which is not a function_call before it that waits for a result.",
            f"{where}.call_id",
        )
    del waiting[call]
    texts = [output] if isinstance(output, str) else [part["text"] for part in output]
    return {"role": "tool", "tool_call_id": call, "content": _content(texts)}


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return one text as it is, several as parts: the template, or the server for it, joins these as everywhere."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
