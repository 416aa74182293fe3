"""The embedded model's chat template: every kind of message, in Jinja's immutable sandbox."""

import json
from typing import Any

import pytest
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ferrule_contrib.tiny import path
from tools.tiny import chat

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NO_THINKING = "<think>\n\n</think>\n\n"


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return chat.load_template().render(messages=messages, **options)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}], **more}


def test_a_question_alone() -> None:
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert render([USER]) == turn
    assert render([USER], add_generation_prompt=True) == turn + "<|im_start|>assistant\n" + NO_THINKING


def test_thinking_leaves_the_opening_to_the_model() -> None:
    opened = render([USER], add_generation_prompt=True, enable_thinking=True)
    assert opened.endswith("<|im_start|>assistant\n")
    assert render([USER], add_generation_prompt=True, enable_thinking=False).endswith(NO_THINKING)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_prompt_comes_first_and_takes_the_tools(role: str) -> None:
    system = {"role": role, "content": "Be brief."}
    assert render([system, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    with_tools = render([system, USER], tools=[TOOL, TOOL])
    line = json.dumps(TOOL) + "\n"
    head = "<|im_start|>system\nBe brief.\n\nYou may call these tools:\n<tools>\n"
    assert with_tools.startswith(f"{head}{line}{line}</tools><|im_end|>\n<|im_start|>user\n")


def test_tools_without_a_system_prompt_and_no_tools() -> None:
    assert render([USER], tools=[TOOL]).startswith("<|im_start|>system\nYou may call these tools:\n<tools>\n{")
    assert render([USER], tools=None) == render([USER], tools=[]) == render([USER])


@pytest.mark.parametrize("arguments", [{"city": "Köln", "n": 2}, '{"city": "Köln", "n": 2}'])
def test_calls_take_arguments_as_object_or_text(arguments: Any) -> None:
    expected = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "n": 2}}\n</tool_call><|im_end|>\n'
    assert render([USER, call(arguments)]).endswith("<|im_start|>assistant\n" + expected)


@pytest.mark.parametrize("arguments", [{}, "", None])
def test_calls_without_arguments(arguments: Any) -> None:
    assert '{"name": "f", "arguments": {}}\n</tool_call>' in render([USER, call(arguments)])


def test_several_calls_and_their_results_are_one_turn_each() -> None:
    both = call({"a": 1})
    both["tool_calls"] = both["tool_calls"] * 2
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    text = render([USER, both, *results], add_generation_prompt=True)
    assert text.count("<tool_call>") == 2
    assert text.count("<|im_start|>assistant") == 2
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    ) in text


@pytest.mark.parametrize("content", ["Hi", ["Hi"], [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]])
def test_content_may_come_in_parts(content: Any) -> None:
    assert render([{"role": "user", "content": content}]) == render([USER])


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_content_may_be_missing(message: dict[str, Any]) -> None:
    assert render([USER, message]).endswith("<|im_start|>assistant\n<|im_end|>\n")


@pytest.mark.parametrize(
    "before",
    [
        {"role": "assistant", "content": "A", "reasoning_content": "why"},
        {"role": "assistant", "content": "A", "reasoning": "why"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nA"},
    ],
)
def test_old_thoughts_are_dropped_and_those_of_this_turn_kept(before: dict[str, Any]) -> None:
    thought = "<think>\nwhy\n</think>\n\nA<|im_end|>"
    assert "why" not in render([USER, before, USER])
    assert thought in render([USER, before])
    assert thought in render([USER, before, {"role": "tool", "content": "r"}], add_generation_prompt=True)


def test_it_renders_where_undefined_names_are_errors() -> None:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string((path() / "chat_template.jinja").read_text(encoding="utf-8"))
    messages = [USER, {"role": "assistant"}, USER, call({"a": 1}), {"role": "tool", "content": None}]
    for part in ([USER], messages):
        assert template.render(messages=part) == render(part)


def test_transformers_renders_the_same() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path())
    messages = [USER, call({"a": "<b>"}), {"role": "tool", "content": "r & s"}]
    for thinking in (False, True):
        options: dict[str, Any] = {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": thinking}
        expected = render(messages, **options)
        assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected
