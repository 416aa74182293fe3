"""OpenAI's official client and the embedded model over Responses: answers, streams, tools, thoughts, chains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from ferrule_testkit import server as servers
from tests.e2e.http.conftest import AGENT_KEY
from tests.fakes.serving import Here

ASK = "What is the capital of France?"
SUM = "What is 23 + 45?"
BASE: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 120}
LONG: dict[str, Any] = BASE | {"input": "Count.", "max_output_tokens": 1500}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
WRITE: dict[str, Any] = {
    "type": "function",
    "name": "append_word",
    "description": "Append a word to the file",
    "parameters": {
        "type": "object",
        "properties": {"word": {"enum": ["red", "green", "blue"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "strict": False,
}
THINK: dict[str, Any] = {"reasoning": {"effort": "high"}}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}


@pytest.fixture(scope="module")
def client(agent_server: Here) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key=AGENT_KEY, max_retries=0, timeout=240) as found:
        yield found


def plain(response: Any) -> dict[str, Any]:
    """Return a response without its ids and times, and with calls of the same ids."""
    found = response.to_dict()
    for name in ("id", "created_at", "completed_at", "ferrule"):
        found.pop(name, None)
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    found["usage"].pop("input_tokens_details")
    return dict(found)


def sent(client: Any, **body: Any) -> list[Any]:
    """Return the events of a stream."""
    return list(client.responses.create(stream=True, **body))


@pytest.mark.parametrize(
    "body",
    [
        {"input": ASK},
        {"input": [{"role": "user", "content": ASK}], "instructions": "Be brief.", "max_output_tokens": 3},
        {"input": SUM, **THINK, "include": ["reasoning.encrypted_content"]},
        {"input": ASK, "tools": [WEATHER], "tool_choice": "required"},
        {"input": ASK, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ],
)
def test_a_stream_says_what_the_whole_says(client: Any, body: dict[str, Any]) -> None:
    whole = client.responses.create(**BASE | body)
    events = sent(client, **BASE | body)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert plain(events[-1].response) == plain(whole)
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in items] == [item.to_dict() for item in events[-1].response.output]
    for kind, texts in (("output_text", "text"), ("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        assert deltas == "".join(getattr(event, texts) for event in events if event.type == f"response.{kind}.done")
    counted = {name: value for name, value in body.items() if name in ("input", "instructions", "tools", "tool_choice")}
    counted |= {"reasoning": body["reasoning"]} if "reasoning" in body else {}
    assert client.responses.input_tokens.count(model="tiny", **counted).input_tokens == whole.usage.input_tokens
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_the_clients_own_stream_reads_it(client: Any) -> None:
    for body in (
        {"input": ASK},
        {"input": SUM, **THINK},
        {"input": ASK, "tools": [WEATHER], "tool_choice": "required"},
    ):
        with client.responses.stream(**BASE | body) as stream:
            for _ in stream:
                pass
            made = stream.get_final_response()
        assert [item.type for item in made.output]
        whole = client.responses.create(**BASE | body)
        assert made.output_text == whole.output_text


def test_what_is_answered(client: Any) -> None:
    answer = client.responses.create(input=ASK, metadata={"a": "b"}, user="u1", **BASE)
    assert "Paris" in answer.output_text
    assert (answer.status, answer.model, answer.metadata, answer.error) == ("completed", "tiny", {"a": "b"}, None)
    cut = client.responses.create(input=ASK, **BASE | {"max_output_tokens": 2})
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.output_tokens == 2


class Sum(BaseModel):
    sum: int


def test_a_form_of_the_answer(client: Any) -> None:
    parsed = client.responses.parse(input=SUM, text_format=Sum, **BASE)
    assert isinstance(parsed.output_parsed, Sum)
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        client.responses.parse(input=SUM, text_format=Sum, tools=[WEATHER], tool_choice="required", **BASE)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_forced_calls(client: Any, choice: Any) -> None:
    other = WEATHER | {"name": "other"}
    answer = client.responses.create(
        input=ASK, tools=[other, WEATHER], tool_choice=choice, parallel_tool_calls=False, **BASE
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert choice == "required" or call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}
    none = client.responses.create(input=ASK, tools=[WEATHER], tool_choice="none", **BASE)
    assert {item.type for item in none.output} == {"message"}


@pytest.mark.parametrize("stored", [True, False])
def test_an_agent_calls_ten_times(client: Any, stored: bool) -> None:
    """Loop as agents do: with `previous_response_id`, and with all items sent back each time."""
    body: Any = BASE | {"tools": [WRITE], "store": stored, "parallel_tool_calls": False}
    said: list[Any] = [{"role": "user", "content": ASK}]
    items, previous = list(said), None
    for turn in range(10):
        asked = {"input": said, "previous_response_id": previous} if stored else {"input": items}
        answer = client.responses.create(tool_choice="required", **body, **asked)
        (call,) = answer.output
        assert call.type == "function_call"
        said = [{"type": "function_call_output", "call_id": call.call_id, "output": f"{turn + 1} words"}]
        items += [*answer.output, *said]
        previous = answer.id
    asked = {"input": said, "previous_response_id": previous} if stored else {"input": items}
    last = client.responses.create(tool_choice="none", **body, **asked)
    assert last.usage.input_tokens_details.cached_tokens > last.usage.input_tokens / 2
    if stored:
        listed = client.responses.input_items.list(last.id)
        assert [item.type for item in listed] == ["function_call_output"]


def test_thoughts_come_back_unchanged_or_are_refused(client: Any) -> None:
    """Go on as Codex does: nothing stored, a stream, and items that come back, thoughts sealed."""
    body: Any = (
        BASE
        | THINK
        | {
            "store": False,
            "stream": True,
            "instructions": "You are a coding agent.",
            "tools": [WEATHER],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "prompt_cache_key": "a",
            "include": ["reasoning.encrypted_content"],
        }
    )
    items: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": SUM}]}]
    events = list(client.responses.create(input=items, **body))
    output = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert output[0]["type"] == "reasoning"
    thought = {name: value for name, value in output[0].items() if name != "content"}
    more = [*items, thought, *output[1:], {"role": "user", "content": ASK}]
    again = list(client.responses.create(input=more, **body))
    assert again[-1].type == "response.completed"
    wrong = thought | {"encrypted_content": thought["encrypted_content"][:-8] + "AAAAAAA="}
    with pytest.raises(openai.BadRequestError, match=r"input\[1\].encrypted_content"):
        client.responses.create(input=[*items, wrong, *output[1:], *items], **body)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(events[-1].response.id)


def test_a_conversation_goes_on(client: Any) -> None:
    first = client.responses.create(input=ASK, instructions="Be brief.", **BASE)
    second = client.responses.create(input=SUM, previous_response_id=first.id, **BASE)
    third = client.responses.create(
        input=[{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": SUM}], **BASE
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    stored = client.responses.retrieve(third.id)
    assert stored.to_dict() == third.to_dict()
    page = client.responses.input_items.list(third.id, limit=1, order="asc")
    assert page.data[0].to_dict() == first.output[0].to_dict()
    assert [item.type for item in page] == ["message", "message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"{first.id}.*which {second.id} continues"):
        client.responses.create(input=SUM, previous_response_id=second.id, **BASE)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)


def test_the_background(client: Any) -> None:
    queued = client.responses.create(input=ASK, background=True, **BASE)
    assert queued.status == "queued"
    assert servers.until(lambda: client.responses.retrieve(queued.id).status == "completed")
    done = client.responses.retrieve(queued.id)
    assert "Paris" in done.output_text
    assert client.responses.cancel(queued.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        list(client.responses.retrieve(queued.id, stream=True))
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(input=ASK, **BASE).id)


def test_a_stream_in_the_background_can_be_taken_up(client: Any) -> None:
    stream = client.responses.create(input=ASK, background=True, stream=True, **BASE)
    begun = [next(stream) for _ in range(4)]
    stream.close()
    name = begun[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == list(range(4, 4 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.to_dict() == client.responses.retrieve(name).to_dict()
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in [*begun, *rest]]


def running(server: Here) -> float:
    answer = httpx.get(f"{server.url}/metrics", timeout=240, headers={"authorization": f"Bearer {AGENT_KEY}"})
    lines = answer.text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_who_leaves_and_who_cancels_frees_the_row(client: Any, agent_server: Here) -> None:
    stream = client.responses.create(stream=True, **LONG)
    assert next(stream).type == "response.created"
    stream.close()
    assert servers.until(lambda: running(agent_server) == 0)
    for end in (client.responses.cancel, client.responses.delete):
        queued = client.responses.create(background=True, **LONG)
        end(queued.id)  # that it was cancelled in time is asked where a gate holds the engine
        assert servers.until(lambda: running(agent_server) == 0)
    assert client.responses.create(input=ASK, **BASE).output


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input must"),
        ({"temperature": -1}, "temperature must"),
        ({"max_output_tokens": 1 << 20}, "max_tokens is 1048576"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c1", "output": ""}]},
            r"input\[0\].call_id names 'c1'",
        ),
        ({"input": [CALL, CALL]}, r"input\[1\].call_id: another call"),
        ({"input": [CALL, {"role": "user", "content": "x"}]}, "The call 'c1' has no result"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "takes text only"),
        ({"tools": [{"type": "web_search"}]}, "hosted tools such as web_search do not run here"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_wether"}}, "Did you mean 'get_weather'"),
        ({"conversation": "c"}, "conversation: not in this build"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata may have at most 16"),
        ({"background": True, "store": False}, "background needs store"),
    ],
)
def test_bad_requests(client: Any, body: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(**BASE | {"input": ASK, "stream": stream} | body)


def test_unknown_ids_are_not_found(client: Any) -> None:
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="resp_none"):
            call("resp_none")
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(input=ASK, previous_response_id="resp_none", **BASE)
    with pytest.raises(openai.NotFoundError, match=r"input\[0\].id"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_x_0"}], **BASE)
    with pytest.raises(openai.NotFoundError, match="truncation auto"):
        client.responses.compact(model="tiny", input=ASK)
