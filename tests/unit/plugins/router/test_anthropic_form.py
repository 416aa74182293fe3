"""The events of a stream of Messages add up to the whole message, in every cut, and come in the documented order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter, with_config
from pydantic_core import from_json

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ferrule.interfaces.service import Answer, Output, Usage, add_up
from ferrule.types import FinishReason
from ferrule_plugins.router.anthropic.answers import Message, MessageEvent
from ferrule_plugins.router.anthropic.conversation import signature_of
from ferrule_plugins.router.anthropic.form import MessageForm
from tests.unit.plugins.router.test_openai_forms import CALLS, EVENTS, cut, outputs

CUT_OFF: tuple[Event, ...] = (CallStart(0, "c0", "add"), CallArguments(0, '{"a": "on'), CallEnd(0))
CASES: dict[str, tuple[Event, ...]] = {
    **EVENTS,
    "again": (Reasoning("a"), Content("b"), Reasoning(""), Content("c"), Reasoning("d"), Content("")),
    "after": (*CALLS, Content("Done.")),
    "cut off": CUT_OFF,
    "no arguments": (CallStart(0, "c0", "now"), CallEnd(0)),
    "no JSON": (CallStart(0, "c0", "now"), CallArguments(0, "hello"), CallEnd(0)),
}
ORDER = {
    "message_start": {"ping"},
    "ping": {"content_block_start", "message_delta"},
    "content_block_start": {"content_block_delta", "content_block_stop"},
    "content_block_delta": {"content_block_delta", "content_block_stop"},
    "content_block_stop": {"content_block_start", "message_delta"},
    "message_delta": {"message_stop"},
    "message_stop": set(),
}


def form(many_calls: bool = True) -> MessageForm:
    return MessageForm("msg_1", "m", many_calls, None)


def whole_of(parts: Sequence[Output], many_calls: bool = True) -> Any:
    added = add_up(parts)
    return form(many_calls).whole(Answer(choices=(added,), usage=Usage.total([added.usage], 1)))


def streamed(parts: Iterable[Output], many_calls: bool = True) -> list[Any]:
    written = form(many_calls)
    return [event for part in parts for event in written.chunk(part)]


def read(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join events as a client does."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                for name, value in delta.items():
                    if name == "partial_json":
                        texts[event["index"]] = texts.get(event["index"], "") + value
                        text = texts[event["index"]]
                        block["input"] = from_json(text, allow_partial=True) if text[0] == "{" else text
                    elif name != "type":
                        block[name] += value
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


@pytest.mark.parametrize("many_calls", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_events_add_up_to_the_whole(name: str, many_calls: bool) -> None:
    parts = outputs(0, CASES[name], FinishReason.LENGTH)
    whole = whole_of(parts, many_calls)
    for seed in range(20):
        events = streamed(cut(parts, random.Random(seed)), many_calls)
        assert read(events) == whole
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start"
        assert all(after in ORDER[before] for before, after in zip(kinds, kinds[1:], strict=False))
        assert kinds[-1] == "message_stop"


def test_what_a_whole_message_says() -> None:
    found = whole_of(outputs(0, EVENTS["all"]))
    assert found == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Well, two.", "signature": signature_of("Well, two.")},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c1", "name": "sub", "input": {}},
        ],
        "stop_reason": "stop_sequence",
        "stop_sequence": "x",
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(EVENTS["all"]),
        },
    }
    assert [block["type"] for block in whole_of(outputs(0, CALLS), many_calls=False)["content"]] == ["tool_use"]


@pytest.mark.parametrize(
    ("finish", "stop", "called", "reason"),
    [
        (FinishReason.STOP, None, False, "end_turn"),
        (FinishReason.STOP, 7, False, "end_turn"),
        (FinishReason.STOP, "x", True, "stop_sequence"),
        (FinishReason.STOP, None, True, "tool_use"),
        (FinishReason.LENGTH, None, True, "max_tokens"),
        (FinishReason.ABORT, None, False, "max_tokens"),
    ],
)
def test_reasons_of_the_end(finish: FinishReason, stop: int | str | None, called: bool, reason: str) -> None:
    output = Output(index=0, finish=finish, stop_reason=stop, called_tools=called)
    whole = whole_of([output])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop if isinstance(stop, str) else None)


def test_the_parts_of_a_prompt_add_up() -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=8, completion_tokens=3)
    found = whole_of([Output(index=0, finish=FinishReason.STOP, usage=usage)])["usage"]
    assert found == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 3,
    }


def test_notes_are_in_the_first_event_alone() -> None:
    written = MessageForm("msg_1", "m", True, {"warnings": ["a: unknown, ignored."]})
    events: list[Any] = [event for part in outputs(0, EVENTS["text"]) for event in written.chunk(part)]
    assert events[0]["message"]["ferrule"] == {"warnings": ["a: unknown, ignored."]}
    assert "ferrule" not in repr(events[1:])


def test_what_is_sent_is_what_the_document_tells() -> None:
    """Check the declared types with no further keys allowed."""
    strict = ConfigDict(extra="forbid")
    message, event = (TypeAdapter(with_config(strict)(kind)) for kind in (Message, MessageEvent))
    for events in CASES.values():
        message.validate_python(whole_of(outputs(0, events)))
        for sent in streamed(outputs(0, events)):
            event.validate_python(sent)
