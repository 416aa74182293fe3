"""Ollama's official client and the embedded model: answers, streams, tools, thoughts, forms, models, errors."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from ferrule_testkit import server as servers
from tests.e2e.http.conftest import AGENT_KEY as KEY
from tests.fakes.serving import Here

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 23 + 45?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
GREEDY = {"temperature": 0, "num_predict": 120}
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(agent_server: Here) -> Here:
    return agent_server


@pytest.fixture(scope="module")
def client(server: Here) -> ollama.Client:
    return ollama.Client(server.url, headers=HEADERS, timeout=240)


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: Its name.
    """
    return f"It is sunny in {city}."


def joined(parts: Iterator[Any]) -> tuple[str, str, list[Any], Any]:
    """Return the text, the thoughts and the calls of a stream of messages, and its last part."""
    found = list(parts)
    assert [part.done for part in found] == [False] * (len(found) - 1) + [True]
    messages = [part.message for part in found]
    calls = [call for message in messages for call in message.tool_calls or ()]
    return (
        "".join(one.content or "" for one in messages),
        "".join(one.thinking or "" for one in messages),
        calls,
        found[-1],
    )


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASK},
        {"messages": SUM, "think": True},
        {"messages": SUM, "think": False},
        {"messages": WEATHER, "tools": [get_weather]},
        {"messages": ASK, "options": GREEDY | {"num_predict": 3}},
    ],
)
def test_a_stream_says_what_the_whole_says(client: ollama.Client, body: dict[str, Any]) -> None:
    asked = {"options": GREEDY} | body
    whole = client.chat("tiny", **asked)
    text, thoughts, calls, last = joined(client.chat("tiny", stream=True, **asked))
    assert (text, thoughts) == (whole.message.content, whole.message.thinking or "")
    assert calls == (whole.message.tool_calls or [])
    assert bool(thoughts) is (body.get("think") is True)
    assert bool(calls) is ("tools" in body)
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert getattr(last, name) == getattr(whole, name)
    for found in (last, whole):
        assert found.total_duration > found.prompt_eval_duration > 0
        assert found.total_duration > found.eval_duration > 0


def test_a_function_is_called_and_its_result_read(client: ollama.Client) -> None:
    asked = client.chat("tiny:latest", WEATHER, tools=[get_weather], options=GREEDY)
    (call,) = asked.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Lisbon"})
    result = {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
    told = client.chat("tiny", [*WEATHER, asked.message, result], tools=[get_weather], options=GREEDY)
    assert "sunny" in (told.message.content or "")


def test_forms_of_the_answer(client: ollama.Client) -> None:
    schema: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    assert set(json.loads(client.chat("tiny", SUM, format=schema, options=GREEDY).message.content or "")) == {"sum"}
    text = client.generate("tiny", "What is 23 + 45?", format=schema, options=GREEDY).response
    assert set(json.loads(text or "")) == {"sum"}
    begun = client.chat("tiny", SUM, format="json", options={"temperature": 0, "num_predict": 4}).message.content
    assert (begun or "").lstrip().startswith("{")


def test_generate(client: ollama.Client) -> None:
    asked = client.generate("tiny", ASK[0]["content"], options=GREEDY)
    assert "Paris" in (asked.response or "")
    *_, last = client.generate("tiny", ASK[0]["content"], options=GREEDY, stream=True)
    assert last.context == asked.context
    more = client.generate("tiny", "What is the capital of Japan?", context=asked.context, options=GREEDY)
    assert (more.prompt_eval_count or 0) > len(asked.context or ())
    raw = client.generate("tiny", "1, 2, 3,", raw=True, options=GREEDY | {"num_predict": 4})
    assert (raw.context, raw.eval_count, raw.done_reason) == (None, 4, "length")
    likely = client.generate("tiny", "1, 2, 3,", raw=True, logprobs=True, top_logprobs=2, options={"num_predict": 1})
    (entry,) = likely.logprobs or ()
    assert [each.logprob for each in entry.top_logprobs or ()] == sorted(
        (each.logprob for each in entry.top_logprobs or ()), reverse=True
    )
    assert client.generate("tiny").done_reason == "load"
    assert client.chat("tiny", keep_alive=0).done_reason == "unload"


def test_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("tiny", 2048)
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.details is not None
    assert shown.details.family == "llama"


def test_the_asynchronous_client(server: Here) -> None:
    async def ask() -> list[str]:
        client = ollama.AsyncClient(server.url, headers=HEADERS, timeout=240)
        answers = await asyncio.gather(*(client.chat("tiny", ASK, options=GREEDY) for _ in range(3)))
        parts = [part async for part in await client.chat("tiny", ASK, options=GREEDY, stream=True)]
        return ["".join(part.message.content or "" for part in parts), *(one.message.content or "" for one in answers)]

    assert len(set(asyncio.run(ask()))) == 1


def test_errors_are_the_clients_own(client: ollama.Client, server: Here) -> None:
    wrong: list[tuple[int, str, Any]] = [
        (404, "tiny", lambda: client.chat("other", ASK)),
        (404, "not fetched", lambda: client.pull("llama3")),
        (404, "not deleted", lambda: client.delete("tiny")),
        (400, "is for generate, and not for embed", lambda: client.embed("tiny", "hello")),
        (400, "options.temperature must be a number", lambda: client.chat("tiny", ASK, options={"temperature": "hot"})),
        (400, "options.top_p must be", lambda: list(client.chat("tiny", ASK, options={"top_p": 7.0}, stream=True))),
        (400, "no tokens to fill in the middle", lambda: client.generate("tiny", "a", suffix="b")),
        (400, "context holds", lambda: client.generate("tiny", "a", context=[1 << 40])),
        (400, "images", lambda: client.chat("tiny", [ASK[0] | {"images": [b"abc"]}])),
        (401, "A valid API key is needed", lambda: ollama.Client(server.url, headers={}).list()),
    ]
    for status, message, call in wrong:
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status
        assert message in caught.value.error


def test_curl_as_ollama_s_pages_show_it(server: Here) -> None:
    body = json.dumps({"model": "tiny", "prompt": "1, 2, 3,", "options": {"num_predict": 2}, "raw": True}).encode()
    form = HEADERS | {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{server.url}/api/generate", content=body, headers=form, timeout=240)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1] is True


def test_a_client_that_leaves_frees_its_row(client: ollama.Client, server: Here) -> None:
    def running() -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=240, headers=HEADERS).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    body = json.dumps({"model": "tiny", "prompt": "Count.", "raw": True, "options": {"num_predict": 1900}}).encode()
    head = (
        f"POST /api/generate HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as left:
        left.sendall(head.encode() + body)
        assert b"200 OK" in left.recv(1 << 16)
    assert servers.until(lambda: running() == 0)
    assert client.chat("tiny", ASK, options=GREEDY).message.content
