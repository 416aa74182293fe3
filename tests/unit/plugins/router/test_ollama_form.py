"""The lines of a stream of Ollama's add up to the whole answer, in every cut, and calls are always whole."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter, with_config

from ferrule.interfaces.parsers import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ferrule.interfaces.service import Admitted, Answer, Output, Usage, add_up
from ferrule_plugins.router.ollama.answers import OllamaChatAnswer
from ferrule_plugins.router.ollama.form import ChatForm, Form, GenerateForm
from ferrule_testkit.service import ScriptedService
from tests.unit.plugins.router.test_openai_forms import CALLS, EVENTS, cut, outputs

CASES: dict[str, tuple[Event, ...]] = {
    **EVENTS,
    "again": (Reasoning("a"), Content("b"), Reasoning(""), Content("c"), Reasoning("d"), Content("")),
    "after": (*CALLS, Content("Done.")),
    "cut off": (CallStart(0, "c0", "add"), CallArguments(0, '{"a": 1, "b": "on')),
    "no arguments": (CallStart(0, "c0", "now"), CallEnd(0)),
    "no object": (Content("x"), CallStart(0, "c0", "now"), CallArguments(0, "[1]"), CallEnd(0)),
    "no JSON": (CallStart(0, "c0", "now"), CallArguments(0, "hello"), CallEnd(0)),
}
VOLATILE = ("created_at", "total_duration", "prompt_eval_duration", "eval_duration")


def form(kind: type[Form] = ChatForm) -> Form:
    admitted = Admitted(model="m", prompts=(), stream=None)  # type: ignore[arg-type]
    return kind(admitted, ScriptedService(), 0, None, *((None,) if kind is GenerateForm else ()))


def whole_of(parts: Sequence[Output]) -> dict[str, Any]:
    added = add_up(parts)
    return form().whole(Answer(choices=(added,), usage=Usage.total([added.usage], 1)))


def joined(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join lines as a client does."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    found: dict[str, Any] = {}
    logprobs: list[Any] = []
    for line in lines:
        found = line
        logprobs += line.get("logprobs", [])
        for name, value in line["message"].items():
            if name != "role":
                message[name] = message[name] + value if name in message else value
    return found | {"message": message} | ({"logprobs": logprobs} if logprobs else {})


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_cut_says_the_same(name: str) -> None:
    whole = whole_of(outputs(0, CASES[name]))
    for seed in range(8):
        parts = cut(outputs(0, CASES[name]), random.Random(seed))
        written = form()
        lines = [line for part in parts for line in written.lines(part)]
        found = joined(lines)
        assert {key: value for key, value in found.items() if key not in VOLATILE} == {
            key: value for key, value in whole.items() if key not in VOLATILE
        }
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert all(len(line["message"]) > 2 or line["message"]["content"] or line["logprobs"] for line in lines[:-1])
        exact = TypeAdapter(with_config(ConfigDict(extra="forbid"))(OllamaChatAnswer))
        for line in lines:
            exact.validate_python(line)


def test_arguments_are_objects_or_text() -> None:
    (cut_off,) = whole_of(outputs(0, CASES["cut off"]))["message"]["tool_calls"]
    assert cut_off == {"id": "c0", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}}
    (empty,) = whole_of(outputs(0, CASES["no arguments"]))["message"]["tool_calls"]
    assert empty["function"]["arguments"] == {}
    for name, text in (
        ("no object", 'x{"name":"now","arguments":"[1]"}'),
        ("no JSON", '{"name":"now","arguments":"hello"}'),
    ):
        message = whole_of(outputs(0, CASES[name]))["message"]
        assert message == {"role": "assistant", "content": text}


def test_generate_has_thoughts_beside_its_text() -> None:
    written = form(GenerateForm)
    lines = [line for part in outputs(0, (Reasoning("Hm."), Content("Yes."))) for line in written.lines(part)]
    assert [(line["response"], line.get("thinking")) for line in lines][:2] == [("", "Hm."), ("Yes.", None)]
