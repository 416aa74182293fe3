"""Tools and thoughts with the official client and the embedded model: question, call, result, answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ferrule.launch import cli
from ferrule_testkit import server as servers
from tests.fakes.serving import Here
from tools import ROOT

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITIES = ("Lisbon", "Paris", "Oslo", "Rome", "Madrid", "Berlin")  # the model is small: one of them must work
BASE: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 120, "tools": [WEATHER]}
SMALL = ("--max-model-len", "1024", "--num-gpu-blocks-override", "256", "--served-model-name", "tiny")

# A parser in the manner of vLLM's plugin files, for the same format.
PLUGIN = """
import json
import re

from vllm.entrypoints.openai.protocol import (DeltaFunctionCall, DeltaMessage, DeltaToolCall,
                                              ExtractedToolCallInformation, FunctionCall, ToolCall)
from vllm.entrypoints.openai.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module(["plain_hermes"])
class PlainHermes(ToolParser):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.start_id = self.vocab["<tool_call>"]
        self.block = re.compile(r"<tool_call>([^<]*)</tool_call>")

    def read(self, text):
        calls = [json.loads(block) for block in self.block.findall(text)]
        return [FunctionCall(name=call["name"], arguments=json.dumps(call["arguments"])) for call in calls]

    def extract_tool_calls(self, model_output, request):
        calls = [ToolCall(type="function", function=call) for call in self.read(model_output)]
        content = model_output.partition("<tool_call>")[0] or None
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids,
                                     current_token_ids, delta_token_ids, request):
        if self.start_id not in current_token_ids:
            return DeltaMessage(content=delta_text)
        calls = self.read(current_text)
        if len(calls) == len(self.prev_tool_call_arr):
            return None
        index = len(self.prev_tool_call_arr)
        self.prev_tool_call_arr.append({"name": calls[index].name, "arguments": json.loads(calls[index].arguments)})
        function = DeltaFunctionCall(name=calls[index].name, arguments=calls[index].arguments)
        return DeltaMessage(tool_calls=[DeltaToolCall(index=index, id=f"call-{index}", function=function)])
"""


@pytest.fixture(scope="module")
def client(tiny_server: Here) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=240) as found:
        yield found


@pytest.fixture(scope="module")
def asked(client: openai.OpenAI) -> tuple[list[Any], Any]:
    """Return (messages, choice) of a question that the model answers with the right call."""
    for city in CITIES:
        messages: list[Any] = [{"role": "user", "content": f"What is the weather in {city}?"}]
        choice = client.chat.completions.create(messages=messages, **BASE).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        if [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": city})]:
            return messages, choice
    return pytest.fail("the embedded model calls the tool for none of the cities")


def streamed(client: openai.OpenAI, **body: Any) -> tuple[dict[str, Any], str | None]:
    """Return (the message that the deltas add up to, the reason of the end)."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for chunk in client.chat.completions.create(stream=True, **body):
        choice = chunk.choices[0]
        message["content"] += choice.delta.content or ""
        thought = getattr(choice.delta, "reasoning_content", None) or ""
        assert thought == (getattr(choice.delta, "reasoning", None) or "")
        message["reasoning"] += thought
        for call in choice.delta.tool_calls or ():
            function = call.function
            assert function is not None
            if call.id is not None:
                assert call.type == "function"
                message["tool_calls"].append([call.id, function.name, ""])
            assert call.index == len(message["tool_calls"]) - 1
            message["tool_calls"][-1][2] += function.arguments or ""
        finish = choice.finish_reason or finish
    return message, finish


def test_a_question_becomes_a_call(client: openai.OpenAI, asked: tuple[list[Any], Any]) -> None:
    messages, choice = asked
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.id[:5]) == ("function", "call_")
    message, finish = streamed(client, messages=messages, tool_choice="auto", **BASE)
    ((call_id, name, arguments),) = message["tool_calls"]
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert call_id not in ("", call.id)
    assert (message["content"], finish) == ("", "tool_calls")


def test_the_result_becomes_an_answer(client: openai.OpenAI, asked: tuple[list[Any], Any]) -> None:
    messages, choice = asked
    (call,) = choice.message.tool_calls
    told = []
    for said in ("sunny", "rainy", "cloudy"):
        result = {"role": "tool", "tool_call_id": call.id, "content": said}
        body = {**BASE, "messages": [*messages, choice.message, result]}
        answer = client.chat.completions.create(**body).choices[0]
        assert answer.message.tool_calls is None
        message, finish = streamed(client, **body)
        assert message == {"content": answer.message.content, "reasoning": "", "tool_calls": []}
        assert finish == answer.finish_reason
        told.append(answer.finish_reason == "stop" and said in (answer.message.content or ""))
        absent = choice.message.model_dump(exclude_none=True)  # no content at all instead of null
        again = client.chat.completions.create(**{**body, "messages": [*messages, absent, result]}).choices[0]
        assert again.message.content == answer.message.content
    assert any(told)


def test_the_call_in_the_history_reads_as_the_model_wrote_it(
    client: openai.OpenAI, asked: tuple[list[Any], Any]
) -> None:
    messages, choice = asked
    raw = client.chat.completions.create(messages=messages, **{**BASE, "tool_choice": "none"}).choices[0]
    assert raw.message.tool_calls is None
    assert raw.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    text = raw.message.content or ""
    assert text.startswith("<tool_call>")
    assert call.function.arguments in text
    assert streamed(client, messages=messages, **{**BASE, "tool_choice": "none"})[0]["content"] == text


def test_other_questions_need_no_tool(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(messages=messages, **BASE).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI, asked: tuple[list[Any], Any]) -> None:
    messages, choice = asked
    whole = choice.message.tool_calls[0].function.arguments
    for most in (1, 4, 10, 14):
        cut = client.chat.completions.create(messages=messages, **{**BASE, "max_tokens": most}).choices[0]
        assert cut.finish_reason == "length"
        for call in cut.message.tool_calls or ():
            assert whole.startswith(call.function.arguments)
            assert call.function.arguments != whole or most == 14
        assert cut.message.tool_calls or "<tool_call>".startswith((cut.message.content or "")[:11])


def test_thoughts_are_apart(client: openai.OpenAI) -> None:
    body = {**BASE, "messages": [{"role": "user", "content": "What is 23 + 45?"}]}
    del body["tools"]
    body["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    message = client.chat.completions.create(**body).choices[0].message
    thoughts = message.reasoning_content  # type: ignore[attr-defined]
    assert thoughts
    assert thoughts == message.reasoning.strip("\n")  # type: ignore[attr-defined]
    assert message.content
    assert "think>" not in thoughts + message.content
    assert streamed(client, **body)[0] == {"content": message.content, "reasoning": thoughts, "tool_calls": []}
    body["extra_body"]["include_reasoning"] = False
    hidden = client.chat.completions.create(**body).choices[0].message
    assert hidden.content == message.content
    assert not hasattr(hidden, "reasoning")


def test_without_thinking_the_prompt_closes_the_block(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**BASE, "messages": [{"role": "user", "content": "What is 23 + 45?"}]}
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = client.chat.completions.create(extra_body=extra, **body).choices[0].message
        assert message.content
        assert not hasattr(message, "reasoning")


def test_the_example_of_the_documentation(client: openai.OpenAI, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    source = page.partition('```python title="tools.py"\n')[2].partition("```")[0]
    assert "http://127.0.0.1:8000/v1" in source
    script = tmp_path / "tools.py"
    script.write_text(source.replace("http://127.0.0.1:8000/v1", str(client.base_url)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.slow  # tests/unit/plugins/compat_vllm has such files give the same calls
def test_a_file_written_for_vllm(tmp_path: Path, asked: tuple[list[Any], Any]) -> None:
    messages, choice = asked
    file = tmp_path / "plain.py"
    file.write_text(PLUGIN)
    args = ["--tool-parser-plugin", str(file), "--plugin-adapter", "ferrule_plugins.compat_vllm"]
    args += ["--enable-auto-tool-choice", "--tool-call-parser", "plain_hermes", *SMALL]
    with (
        servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=240) as client,
    ):
        whole = client.chat.completions.create(messages=messages, **BASE).choices[0]
        message, finish = streamed(client, messages=messages, **BASE)
    (expected,) = choice.message.tool_calls
    (call,) = whole.message.tool_calls or ()
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == (expected.function.name, expected.function.arguments)
    assert message["tool_calls"] == [["call-0", expected.function.name, expected.function.arguments]]
    assert finish == "tool_calls"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice needs --tool-call-parser"),
        (["--tool-call-parser", "hermse"], "Did you mean 'hermes'"),
        (["--reasoning-parser", "qwen"], "Did you mean 'qwen3'"),
        (["--tool-parser-plugin", "/no/such/file.py"], "cannot be read"),
    ],
)
def test_a_wrong_start_is_refused_at_once(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *args]) in (1, 2)
    assert message in capsys.readouterr().err
