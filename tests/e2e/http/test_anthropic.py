"""Anthropic's official client and the embedded model: answers, streams, tools, thoughts, errors, an agent's loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from ferrule_testkit import server as servers
from tests.e2e.http.conftest import AGENT_KEY as KEY
from tests.fakes.serving import Here

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 23 + 45?"}]
# The client has no argument for the temperature.
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 120, "extra_body": {"temperature": 0}}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
WRITE: dict[str, Any] = {
    "name": "append_word",
    "description": "Append a word to the file",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"enum": ["red", "green", "blue"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
USE: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


@pytest.fixture(scope="module")
def server(agent_server: Here) -> Here:
    return agent_server


@pytest.fixture(scope="module")
def client(server: Here) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=240) as found:
        yield found


def streamed(client: anthropic.Anthropic, **body: Any) -> tuple[Any, list[str]]:
    """Return the message that the client makes of a stream, and the types of the events."""
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def blocks_of(message: Any) -> list[dict[str, Any]]:
    """Return the blocks without the ids of calls, which are random."""
    return [{name: value for name, value in block.to_dict().items() if name != "id"} for block in message.content]


def prompt_of(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASK},
        {"messages": ASK, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 3},
        {"messages": SUM, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": ASK, "tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"messages": ASK, "stop_sequences": ["France"]},
    ],
)
def test_a_stream_says_what_the_whole_says(client: anthropic.Anthropic, body: dict[str, Any]) -> None:
    whole = client.messages.create(**BASE | body)
    made, kinds = streamed(client, **BASE | body)
    assert blocks_of(made) == blocks_of(whole)
    assert (made.stop_reason, made.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert made.usage.output_tokens == whole.usage.output_tokens > 0
    assert prompt_of(made.usage) == prompt_of(whole.usage)
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stop_sequences")}
    assert client.messages.count_tokens(model="tiny", **counted).input_tokens == prompt_of(whole.usage)


def test_what_is_answered(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(messages=ASK, metadata={"user_id": "u1"}, **BASE)
    assert [block.type for block in answer.content] == ["text"]
    assert "Paris" in answer.content[0].text  # type: ignore[union-attr]
    assert (answer.model, answer.role, answer.stop_reason) == ("tiny", "assistant", "end_turn")
    cut = client.messages.create(messages=ASK, stop_sequences=["Paris"], **BASE)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "Paris")
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    assert "Paris" in client.messages.create(messages=begun, **BASE).content[0].text  # type: ignore[union-attr]
    huge = client.messages.create(messages=ASK, **BASE | {"max_tokens": 1_000_000})
    assert blocks_of(huge) == blocks_of(answer)


def test_usage_tells_what_the_prefix_cache_did(client: anthropic.Anthropic) -> None:
    marked = {"type": "text", "text": "Answer in one word. " * 12, "cache_control": {"type": "ephemeral"}}
    body: Any = {"messages": ASK, "system": [marked], **BASE, "max_tokens": 4}
    first, second = (client.messages.create(**body).usage for _ in range(2))
    assert prompt_of(first) == prompt_of(second)
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens >= 16
    assert second.input_tokens < first.input_tokens


def test_thoughts_come_back_unchanged_or_are_refused(client: anthropic.Anthropic) -> None:
    body: Any = BASE | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked = client.messages.create(messages=SUM, **body)
    assert [block.type for block in asked.content] == ["thinking", "text"]
    more: list[Any] = [*SUM, {"role": "assistant", "content": asked.content}, *ASK]
    assert client.messages.create(messages=more, **body).content
    thought = asked.content[0].to_dict()
    for wrong in (thought | {"signature": "AAAA"}, thought | {"thinking": "42."}):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[0\].signature"):
            client.messages.create(messages=[*SUM, {"role": "assistant", "content": [wrong]}, *ASK], **body)
    off = client.messages.create(messages=SUM, thinking={"type": "disabled"}, **BASE)
    assert [block.type for block in off.content] == ["text"]
    assert blocks_of(client.messages.create(messages=SUM, **BASE)) == blocks_of(off)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_calls(client: anthropic.Anthropic, choice: dict[str, Any], parallel: bool) -> None:
    choice = choice | {"disable_parallel_tool_use": not parallel}
    answer: Any = client.messages.create(messages=ASK, tools=[WEATHER], tool_choice=choice, **BASE)
    assert answer.stop_reason == "tool_use"
    assert {block.type for block in answer.content} == {"tool_use"}
    assert set(answer.content[0].input) == {"city"}
    assert parallel or len(answer.content) == 1


def test_no_calls(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(messages=ASK, tools=[WEATHER], tool_choice={"type": "none"}, **BASE)
    assert {block.type for block in answer.content} == {"text"}


def test_a_form_of_the_answer(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer: Any = client.messages.create(messages=SUM, output_config=output, **BASE)
    assert set(json.loads(answer.content[0].text)) == {"sum"}
    with pytest.raises(anthropic.BadRequestError, match="output_config.format"):
        client.messages.create(messages=SUM, output_config=output, tools=[WEATHER], tool_choice={"type": "any"}, **BASE)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_edits_a_file_in_ten_turns(client: anthropic.Anthropic, tmp_path: Path, stream: bool) -> None:
    file, written = tmp_path / "words.txt", []
    messages: list[Any] = [{"role": "user", "content": "Write a word to the file, again and again."}]
    forced: Any = {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(10):
        body: Any = BASE | {"messages": messages, "tools": [WRITE], "tool_choice": forced}
        answer: Any = streamed(client, **body)[0] if stream else client.messages.create(**body)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert (answer.stop_reason, call.name) == ("tool_use", "append_word")
        with file.open("a") as end:
            end.write(call.input["word"] + "\n")
        written.append(call.input["word"])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"{len(written)} words"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert file.read_text().split() == written
    assert len(written) == 10
    last = client.messages.create(messages=messages, tools=[WRITE], tool_choice={"type": "none"}, **BASE)
    assert (last.usage.cache_read_input_tokens or 0) > last.usage.input_tokens  # a turn reads what those before wrote


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages must"),
        ({"extra_body": {"temperature": -1}}, "temperature must"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, r"messages\[0\].content\[0\].tool_use_id names 't1'"),
        ({"messages": [*ASK, {"role": "assistant", "content": [USE]}, *ASK]}, "the call 't1' needs a tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "takes text only"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_wether"}}, "Did you mean 'get_weather'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers: not in this build"),
        ({"max_tokens": 2047}, "max_tokens is 2047"),
    ],
)
def test_bad_requests(client: anthropic.Anthropic, body: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=message) as caught:
            client.messages.create(**BASE | {"messages": ASK, "stream": stream} | body)
        found: Any = caught.value.body
        assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
        assert found["request_id"] == caught.value.request_id


def test_errors_are_the_clients_own(client: anthropic.Anthropic, server: Here) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(messages=ASK, **BASE | {"model": "claude-other"})
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        client.messages.count_tokens(messages=ASK, model="claude-other")
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        client.with_options(api_key="wrong").messages.create(messages=ASK, **BASE)
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as bearer:
        assert bearer.messages.create(messages=ASK, **BASE).content
    raw = client.messages.with_raw_response.create(messages=ASK, **BASE | {"extra_body": {"colour": 1}})
    assert raw.headers["x-ferrule-ignored-fields"] == "colour"
    assert raw.parse().id == f"msg_{raw.headers['request-id']}"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"[" * 5000, 400, "invalid_request_error"),
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages", b" " * (40 << 20), 413, "request_too_large"),
    ],
)
def test_every_error_has_the_form(server: Here, method: str, path: str, content: bytes, status: int, kind: str) -> None:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=240) as http:
        answer = http.request(method, path, content=content, headers=headers)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind)
    assert found["request_id"] == answer.headers["request-id"]


def test_max_tokens_is_required(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is required"):
        client.post("/v1/messages", body={"model": "tiny", "messages": ASK}, cast_to=object)


def test_a_client_that_leaves_frees_its_row(client: anthropic.Anthropic, server: Here) -> None:
    def running() -> float:
        lines = httpx.get(
            f"{server.url}/metrics", timeout=240, headers={"authorization": f"Bearer {KEY}"}
        ).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    long: Any = BASE | {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 1000}
    with client.messages.create(stream=True, **long) as stream:
        assert next(iter(stream)).type == "message_start"
    assert servers.until(lambda: running() == 0)
    assert client.messages.create(messages=ASK, **BASE).content
