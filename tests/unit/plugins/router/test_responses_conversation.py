"""Items become chat messages; thoughts come back unchanged or not at all; what may be dropped of a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule.errors import RequestError
from ferrule_plugins.router.responses.conversation import conversation, cuts, opened, response_of, sealed


def message(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "text", "text": text} for text in texts]}


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": arguments}


def result(name: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": output}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def read(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return conversation(None, [(f"input[{number}]", item) for number, item in enumerate(items)])


def roles(*items: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(each["role"], each["content"]) for each in read(*items)]


def test_one_answer_is_one_turn() -> None:
    turn, _ = read(thought("a"), message("assistant", "b"), call("1"), message("assistant", "c"), result("1"))
    assert (turn["content"], turn["reasoning"], [each["id"] for each in turn["tool_calls"]]) == ("bc", "a", ["1"])


def test_roles_and_contents() -> None:
    said = roles(
        message("developer", "D"), message("user", "a", "b"), message("assistant", "c"), message("assistant", "d")
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said == [("developer", "D"), ("user", parts), ("assistant", "c"), ("assistant", "d")]
    assert conversation("Be.", [("input", message("user", "x"))])[0] == {"role": "system", "content": "Be."}
    listed = result("1", [{"type": "input_text", "text": "one"}])
    assert roles(call("1"), listed) == [("assistant", None), ("tool", "one")]
    assert roles(call("1"), result("1"), call("1"), result("1"))[2:] == [("assistant", None), ("tool", "done")]
    assert roles(call("1"), call("2"), message("user", "wait"), result("2"), result("1"))[1] == ("user", "wait")


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([result("1")], "input[0].call_id"),
        ([result("1"), call("1")], "input[0].call_id"),
        ([call("1"), result("1"), result("1")], "input[2].call_id"),
        ([call("1"), call("1"), result("1")], "input[1].call_id"),
        ([call("1")], "input[0]"),
        ([call("1"), message("user", "x")], "input[0]"),
        ([call("1", "nonsense"), result("1")], "input[0].arguments"),
    ],
)
def test_calls_and_results_belong_together(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(*items)
    assert caught.value.param == param
    assert param.partition(".")[2] in caught.value.message


def test_a_call_that_was_cut_off_is_completed() -> None:
    turn, _ = read(call("1", '{"city": "Par'), result("1"))
    assert (
        turn["tool_calls"][0]["function"]["arguments"] == '{"city": "Par"}'
        or turn["tool_calls"][0]["function"]["arguments"] == "{}"
    )


@pytest.mark.parametrize("thoughts", ["", "a", "ä🙂\n" * 1000, "\ud800"])
def test_thoughts_come_back_unchanged_or_not_at_all(thoughts: str) -> None:
    content = sealed(thoughts)
    assert opened(content) == thoughts
    (turn,) = read(thought("other") | {"encrypted_content": content})
    assert turn.get("reasoning", "") == thoughts
    for wrong in ("", "AAAA", content[:-4], "ä", "B" + content[1:], content[:40] + "AAAA" + content[44:]):
        with pytest.raises(RequestError, match="encrypted_content"):
            read(thought("") | {"encrypted_content": wrong})


def test_ids_tell_their_response() -> None:
    assert response_of("msg_a.b-1_i0") == "resp_a.b-1"
    assert response_of("msg_a_b_0") == "resp_a_b"
    assert [response_of(each) for each in ("", "msg", "msg_1", "msg_1_", "___")] == [None] * 5


def test_what_may_be_dropped_is_whole_turns() -> None:
    items = [message("user", "a"), thought("b"), call("1"), call("2"), result("1"), message("user", "c"), result("2")]
    items += [message("assistant", "d"), message("user", "e")]
    placed = [(f"input[{number}]", item) for number, item in enumerate(items)]
    assert list(cuts(placed)) == [1, 7, 8]
    for place in cuts(placed):
        conversation(None, placed[place:])
