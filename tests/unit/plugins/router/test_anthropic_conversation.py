"""A conversation in Anthropic's form becomes the one that templates know, or is refused with the place of the fault."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule.errors import RequestError
from ferrule_plugins.router.anthropic.conversation import (
    choice_of,
    continues,
    conversation,
    functions,
    parallel_calls,
    signature_of,
)
from ferrule_plugins.router.anthropic.schema import CountBody

USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": "é"}}
CALL = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def body(*messages: Any, **fields: Any) -> CountBody:
    return CountBody(model="m", messages=list(messages), **fields)


THINKING = {"type": "thinking", "thinking": "Well.", "signature": signature_of("Well.")}
ASK = {"role": "user", "content": "Hi"}
TOLD = {"role": "tool", "tool_call_id": "t1", "content": "2"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([ASK], [ASK]),
        ([user(text("Hi"))], [ASK]),
        ([user(text("a"), text("b"))], [{"role": "user", "content": [text("a"), text("b")]}]),
        ([ASK, ASK], [{"role": "user", "content": [text("Hi"), text("Hi")]}]),
        ([user()], [{"role": "user", "content": ""}]),
        ([ASK, {"role": "assistant", "content": "Yo"}], [ASK, {"role": "assistant", "content": "Yo"}]),
        ([ASK, assistant(text("a"), text("b"))], [ASK, {"role": "assistant", "content": "ab"}]),
        (
            [ASK, assistant(THINKING, text("a"))],
            [ASK, {"role": "assistant", "content": "a", "reasoning": "Well."}],
        ),
        (
            [ASK, assistant(USE), user(RESULT)],
            [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOLD],
        ),
        (
            [ASK, assistant(text("I add."), USE), user(RESULT, text("Go on."))],
            [
                ASK,
                {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
                TOLD,
                {"role": "user", "content": "Go on."},
            ],
        ),
        (
            [ASK, assistant(USE), user(RESULT | {"is_error": True, "content": [text("no"), text("!")]})],
            [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                TOLD | {"content": [text("Error: no"), text("!")]},
            ],
        ),
        (
            [ASK, assistant(USE), user({"type": "tool_result", "tool_use_id": "t1", "is_error": True})],
            [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOLD | {"content": "Error: "}],
        ),
    ],
)
def test_messages(messages: list[Any], expected: list[Any]) -> None:
    assert conversation(body(*messages)) == expected


def test_results_may_come_in_any_order_and_in_several_messages() -> None:
    found = conversation(
        body(ASK, assistant(USE, USE | {"id": "t2"}), user(RESULT | {"tool_use_id": "t2"}), user(RESULT))
    )
    assert [message.get("tool_call_id") for message in found] == [None, None, "t2", "t1"]


@pytest.mark.parametrize(
    ("system", "content"),
    [("Be brief.", "Be brief."), ([text("Be brief.")], "Be brief."), ([text("a"), text("b")], [text("a"), text("b")])],
)
def test_system(system: Any, content: Any) -> None:
    assert conversation(body(ASK, system=system)) == [{"role": "system", "content": content}, ASK]


@pytest.mark.parametrize("system", [None, "", []])
def test_no_system(system: Any) -> None:
    assert conversation(body(ASK, **({} if system is None else {"system": system}))) == [ASK]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([user(RESULT)], "messages[0].content[0].tool_use_id"),
        ([ASK, assistant(USE), user(RESULT | {"tool_use_id": "t2"})], "messages[2].content[0].tool_use_id"),
        ([ASK, assistant(USE), user(RESULT, RESULT)], "messages[2].content[1].tool_use_id"),
        ([ASK, assistant(USE), user(RESULT), assistant(text("a")), user(RESULT)], "messages[4].content[0].tool_use_id"),
        ([ASK, assistant(USE), ASK], "messages[2]"),
        ([ASK, assistant(USE)], "messages[1].content"),
        ([ASK, assistant(USE), user(text("a"), RESULT)], "messages[2].content[1]"),
        ([ASK, assistant(THINKING | {"signature": ""})], "messages[1].content[0].signature"),
        ([ASK, assistant(text("a"), THINKING | {"thinking": "Well!"})], "messages[1].content[1].signature"),
        ([ASK, assistant({"type": "redacted_thinking", "data": "x"})], "messages[1].content[0].data"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(messages: list[Any], where: str) -> None:
    with pytest.raises(RequestError) as caught:
        conversation(body(*messages))
    assert caught.value.param == where
    assert where in caught.value.message


def test_signatures_tell_thoughts_apart_and_stay() -> None:
    assert signature_of("Well.") == "AZ1l37Rr7otUdF8qBHF4Hxm+7UAGuu6K+JH6pn9ElfIo"
    assert len({signature_of(each) for each in ("", " ", "a", "b", "\ud800")}) == 5


def test_only_a_last_message_of_the_assistant_is_continued() -> None:
    assert continues(body(ASK, assistant(text("The capital is"))))
    assert not continues(body(ASK, assistant(text("Yo")), ASK))


def test_tools() -> None:
    tools = body(ASK, tools=[ADD | {"cache_control": {"type": "ephemeral"}}, {"name": "b", "input_schema": {}}]).tools
    assert functions(tools) == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "b", "parameters": {}}},
    ]
    strict = functions(body(ASK, tools=[ADD | {"type": "custom", "strict": True}]).tools)
    assert strict is not None
    assert strict[0]["function"]["strict"] is True
    assert functions(None) is functions([]) is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "none"}, "none"),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], expected: Any) -> None:
    read = body(ASK, tools=[ADD], tool_choice=choice).tool_choice
    assert choice_of(read) == expected
    assert parallel_calls(read)
    if choice["type"] != "none":
        assert not parallel_calls(
            body(ASK, tools=[ADD], tool_choice=choice | {"disable_parallel_tool_use": True}).tool_choice
        )
    assert choice_of(None) is None
