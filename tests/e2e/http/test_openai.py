"""The official client against the real server."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from ferrule_testkit import server as servers

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("org/other")


def test_completion_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="hello", **GREEDY)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    stream = client.completions.create(prompt="hello", stream=True, stream_options={"include_usage": True}, **GREEDY)
    parts = list(stream)
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    message = whole.choices[0].message
    assert message.role == "assistant"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for entry in logprobs.content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy
    assert (
        b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode("utf-8", "replace") == message.content
    )
    stream = client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == message.content


def test_choices_are_seeded_and_repeatable(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": ["hello", "bye"], "n": 3, "seed": 5, "max_tokens": 8}
    first = [choice.text for choice in client.completions.create(**body).choices]
    again = [choice.text for choice in client.completions.create(**body).choices]
    assert first == again
    assert len(set(first[:3])) > 1
    solo = client.completions.create(**{**body, "prompt": "hello", "n": 1}).choices[0].text
    assert solo == first[0]


def test_prompt_as_ids_equals_prompt_as_text(client: openai.OpenAI, server: servers.Server) -> None:
    with httpx.Client(base_url=server.url, timeout=240) as http:
        ids = http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "hello"
    by_text = client.completions.create(prompt="hello", **GREEDY).choices[0].text
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == by_text


def test_stop_and_extra_parameters(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="hello", **GREEDY).choices[0].text
    stop = text[3:5]
    cut = client.completions.create(prompt="hello", stop=[stop], **GREEDY).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)  # type: ignore[attr-defined]
    kept = client.completions.create(
        prompt="hello", stop=[stop], extra_body={"include_stop_str_in_output": True}, **GREEDY
    ).choices[0]
    assert kept.text == text[: text.index(stop)] + stop
    body = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True, "prompt_logprobs": 0}
    extra = client.completions.create(prompt="hello", extra_body=body, **{**GREEDY, "temperature": 1}).choices[0]
    assert extra.text == text
    assert extra.prompt_logprobs[0] is None  # type: ignore[attr-defined]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt="hello", echo=True, logprobs=1, **GREEDY).choices[0]
    assert choice.text.startswith("hello")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    alone = client.completions.create(prompt="hello", echo=True, logprobs=1, **{**GREEDY, "max_tokens": 0}).choices[0]
    assert alone.text == "hello"
    assert alone.logprobs is not None
    prefix = logprobs.token_logprobs[1 : len(alone.logprobs.tokens or [])]
    assert (alone.logprobs.token_logprobs or [])[1:] == pytest.approx(prefix, abs=1e-4)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**GREEDY, "model": "other"}, prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="a", **{**GREEDY, "temperature": -1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[], **GREEDY)
    assert str(caught.value.param).startswith("messages")


def test_warnings_do_not_trouble_the_client(client: openai.OpenAI) -> None:
    extra: dict[str, Any] = {"extra_body": {"temperatur": 1}}
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY, **extra)
    assert whole.ferrule["warnings"][0].startswith("temperatur: unknown")  # type: ignore[attr-defined]
    assert whole.choices[0].message.content
    parts = list(client.completions.create(prompt="hello", stream=True, **GREEDY, **extra))
    assert [hasattr(part, "ferrule") for part in parts] == [True] + [False] * (len(parts) - 1)
    raw = client.completions.with_raw_response.create(prompt="hello", **GREEDY, extra_body={"store": True})
    assert raw.headers["x-ferrule-ignored-fields"] == "store"


def test_metrics_count_what_was_done(client: openai.OpenAI, server: servers.Server) -> None:
    def figure(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=240).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    names = ("vllm:e2e_request_latency_seconds_count", "vllm:request_generation_tokens_sum")
    before = [figure(name) for name in names]
    client.completions.create(prompt="hello", extra_body={"ignore_eos": True}, **GREEDY)
    assert [figure(name) for name in names] == [before[0] + 1, before[1] + 12]
    assert figure("vllm:num_requests_running") == 0
