"""Output of a given form over HTTP: the official client, tools, thoughts, neighbours, and hostile constraints."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.fakes.serving import Here

ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 150,
    "temperature": 1,
    "seed": 3,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def server(tiny_server: Here) -> Here:
    return tiny_server


def fits(text: str | None) -> bool:
    value = json.loads(text or "")
    return set(value) == {"city", "days"} and value["city"] in {"Paris", "Rome"} and 1 <= value["days"] <= 9


def test_the_client_parses_a_pydantic_class(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(**ASK, response_format=Weather)
    assert isinstance(found.choices[0].message.parsed, Weather)
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-z]+!"}, "[0-9]{3}-[a-z]+!"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"structured_outputs": {"regex": "x{2,4}"}}, "x{2,4}"),
    ],
)
def test_other_forms(client: openai.OpenAI, field: dict[str, Any], pattern: str) -> None:
    ask = ASK | {"max_tokens": 40}
    chat = client.chat.completions.create(**ask, n=2, extra_body=field)
    plain = {name: value for name, value in ask.items() if name != "messages"}
    completion = client.completions.create(**plain, prompt="The number", extra_body=field)
    for choice in chat.choices:
        assert re.fullmatch(pattern, choice.message.content or "") or choice.finish_reason == "length"
    assert re.fullmatch(pattern, completion.choices[0].text) or completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize("thinking", [False, True])
def test_thoughts_come_before_the_form(client: openai.OpenAI, thinking: bool) -> None:
    extra = {"guided_json": SCHEMA, "chat_template_kwargs": {"enable_thinking": thinking}}
    found = client.chat.completions.create(**ASK | {"max_tokens": 600}, extra_body=extra).choices[0]
    assert found.finish_reason == "length" or fits(found.message.content)


def num_thoughts(client: openai.OpenAI, ids: list[int], begins: bool) -> int:
    """Count the tokens of the reasoning. `begins`: the prompt opened it."""

    def tokens(text: str) -> list[int]:
        asked = httpx.post(f"{client.base_url}".replace("/v1/", "/tokenize"), json={"model": "tiny", "prompt": text})
        found: list[int] = asked.json()["tokens"]
        return found

    def place(wanted: list[int]) -> int:
        return next(at for at in range(len(ids)) if ids[at : at + len(wanted)] == wanted)

    opening, closing = tokens("<think>"), tokens("</think>")
    return place(closing) - (0 if begins else place(opening) + len(opening))


@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_end_with_their_budget(client: openai.OpenAI, budget: int, schema: Any) -> None:
    think = {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}
    extra = {**think, "thinking_token_budget": budget, **({"guided_json": schema} if schema else {})}
    ask = {**ASK, "messages": [{"role": "user", "content": "What is 23 + 45?"}], "n": 2, "max_tokens": 200}
    for choice in client.chat.completions.create(**ask, extra_body=extra).choices:
        ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
        shown = getattr(choice.message, "reasoning", "")
        assert getattr(choice.message, "reasoning_content", "") == shown
        assert num_thoughts(client, ids, begins=False) == budget
        assert "think>" not in f"{shown}{choice.message.content}"
        assert choice.message.content
        assert schema is None or choice.finish_reason == "length" or fits(choice.message.content)
    deltas = client.chat.completions.create(**{**ask, "n": 1, "stream": True}, extra_body=extra)
    streamed = [chunk.choices[0].delta for chunk in deltas if chunk.choices]
    content = "".join(delta.content or "" for delta in streamed)
    whole = client.chat.completions.create(**{**ask, "n": 1}, extra_body=extra).choices[0].message
    assert content == whole.content
    assert "".join(getattr(delta, "reasoning", "") for delta in streamed) == getattr(whole, "reasoning", "")


def test_calls_come_behind_thoughts(client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 8, "include_reasoning": False}
    ask = {**ASK, "tools": [WEATHER, NOW], "tool_choice": NAMED, "max_tokens": 300}
    message = client.chat.completions.create(**ask, extra_body=extra).choices[0].message
    assert message.tool_calls
    assert fits(message.tool_calls[0].function.arguments)
    assert not message.content
    assert not hasattr(message, "reasoning")


def test_completions_constrain_what_follows_the_thoughts_of_the_prompt(client: openai.OpenAI) -> None:
    plain = {name: value for name, value in ASK.items() if name != "messages"} | {"max_tokens": 200}
    extra = {"guided_json": SCHEMA, "thinking_token_budget": 4, "return_token_ids": True}
    choice = client.completions.create(**plain, prompt="The weather: <think>\n", extra_body=extra).choices[0]
    ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
    assert num_thoughts(client, ids, begins=True) <= 4
    assert choice.finish_reason == "length" or fits(choice.text.partition("</think>")[2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
def test_calls_are_enforced(client: openai.OpenAI, choice: Any, finish: str, stream: bool) -> None:
    ask = {**ASK, "tools": [WEATHER, NOW], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
    if stream:
        with client.chat.completions.stream(**ask) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**ask).choices[0]
    assert answer.finish_reason == finish
    assert not answer.message.content
    (call,) = answer.message.tool_calls or []
    if call.function.name == "get_weather":
        assert fits(call.function.arguments)
    else:
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


def test_neighbours_keep_their_tokens(client: openai.OpenAI) -> None:
    def ask(extra: dict[str, Any] | None = None) -> str:
        settings = {**ASK, "temperature": 0, "max_tokens": 40}
        return client.chat.completions.create(**settings, extra_body=extra).choices[0].message.content or ""

    alone = ask()
    with ThreadPoolExecutor(6) as threads:
        free = [threads.submit(ask) for _ in range(3)]
        held = [threads.submit(ask, {"guided_json": SCHEMA}) for _ in range(3)]
    assert {each.result() for each in free} == {alone}
    assert all(fits(each.result()) for each in held)


@pytest.mark.advisory("CVE-2025-48942")
@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}},
        {"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"guided_json": "{"},
        {"guided_choice": []},
        {"guided_choice": ["x" * 8 + str(n) for n in range(100_000)]},
        {"guided_regex": "("},
        {"guided_regex": "(a*)*(?=b)"},
        {"guided_grammar": 'root ::= root "a"'},
        {"guided_grammar": "start: ("},
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"guided_json": SCHEMA, "tools": [WEATHER], "tool_choice": "required"},
        {"guided_json": SCHEMA, "use_beam_search": True, "n": 2, "temperature": 0},
        {"guided_json": SCHEMA, "guided_decoding_backend": "zebra"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
    ],
    ids=lambda field: str(field)[:60],
)
def test_constraints_that_cannot_be_kept_are_refused(server: Here, field: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASK, **field}, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "BadRequestError")
    assert "0x" not in error["message"]
    assert "/" not in error["message"] or "(?" in error["message"]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#/items"}},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}(b{1,1000}){1,1000}"},
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2_000)}},
    ],
    ids=["recursive", "repeated", "wide"],
)
def test_large_constraints_are_answered(server: Here, schema: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASK, "guided_json": schema}, timeout=120)
    assert answer.status_code in {200, 400}
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_without_an_allowed_token_is_the_clients_fault(server: Here, stream: bool) -> None:
    """Refuse it also when the first tokens could be chosen. The metric of corrupted requests does not count it."""
    first, then = (httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in ("7", "x"))
    ask = {**ASK, "stream": stream, "guided_regex": "7x", "allowed_token_ids": first[-1:]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=240)
    assert "No token is allowed" in answer.text
    if stream and answer.status_code == 200:
        error = json.loads(answer.text.rpartition("data: ")[2])["error"]
    else:
        error = answer.json()["error"]
    assert (error["code"], error["param"]) == (400, "guided_regex")
    at_once = httpx.post(f"{server.url}/v1/chat/completions", json={**ask, "allowed_token_ids": then[-1:]}, timeout=240)
    assert "No token is allowed" in at_once.text
    assert '"param":"guided_regex"' in at_once.text
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"corrupted_requests_total\{[^}]*\} 0\.0", metrics), metrics
