"""Hostile requests to the real server: a 4xx that names the field, and a victim that notices nothing."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody
from ferrule_testkit import server as servers
from tools.campaign.victim import beside

VICTIM = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True, "temperature": 0, "logprobs": 1}
LEAKS = re.compile(r"0x[0-9a-f]{6,}|/[a-z_]+/[a-z_/]+\.py|Traceback|site-packages")

NUMBERS: list[Any] = [
    -1,
    0,
    1,
    2,
    1.5,
    -0.0,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    1e308,
    True,
    "1",
    "",
    [],
    {},
    [1],
]
TALK = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"model": "tiny", "prompt": "hello", "max_tokens": 2}),
    "/v1/chat/completions": (ChatBody, {"model": "tiny", "messages": TALK, "max_tokens": 2}),
}
CASES = [(path, field) for path, (kind, _) in ROUTES.items() for field in kind.model_fields]
NAMED_AS = {  # fields whose refusals name another one, too
    "truncate_prompt_tokens": "prompt",
    "continuous_usage_stats": "stream_options",
}
LITERALS = (b"NaN", b"Infinity", b"-Infinity", b"1e309", b"9" * 100_000, b"1" + b"0" * 5000)
JSON = {"content-type": "application/json"}
VOCABULARY = 1 << 20  # certainly more than the model has

RAW = [
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"\xef\xbb\xbf{}", b'{"prompt": "a"}}'),
    *(b"[" * 100_000, b'{"x":' * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    *(b'{"prompt": [' + b"[]," * 500_000 + b"[]]}", b'{"prompt": "' + b"a" * 8_000_000 + b'"}'),
    b'{"prompt": [' + b"5," * 1_000_000 + b"5]}",
]


@asynccontextmanager
async def victim(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """Stream to another client during the block: its answers are whole, and what they are without hostile requests."""
    expected = (await http.post("/v1/completions", json=VICTIM)).json()["choices"]
    with beside(http.base_url.port or 0) as other:
        yield
    assert other.seen.problems == []
    assert (await http.get("/health")).status_code == 200
    assert (await http.post("/v1/completions", json=VICTIM)).json()["choices"] == expected


@pytest.fixture
async def http(server: servers.Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as found:
        yield found


def check(response: httpx.Response, field: str | None, what: object) -> None:
    """Check for a success, or a 4xx of the right shape that names the field."""
    shown = (field, str(what)[:80], response.text[:300])
    if response.status_code == 200:
        return
    assert 400 <= response.status_code < 500, shown
    error = response.json()["error"]
    if isinstance(error, str):  # on Ollama's paths
        error = {"message": error, "type": "", "param": None, "code": response.status_code}
    assert set(error) == {"message", "type", "param", "code"}, shown
    assert not LEAKS.search(response.text), shown
    assert len(error["message"]) < 500, shown
    if field is not None:
        assert field in f"{error['param']} {error['message']}", shown


# Each field meets an eighth of the values, its neighbour others; in `make test-slow`, and over a scripted service in
# tests/unit/plugins/router, all of them.
every = pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.advisory("CVE-2026-22778", "CVE-2026-21869")
@every
async def test_every_field_at_its_borders(every: int, http: httpx.AsyncClient) -> None:
    async with victim(http):
        for index, (path, field) in enumerate(CASES):
            base = ROUTES[path][1]
            for value in NUMBERS[index % every :: every]:
                response = await http.post(path, json={**base, field: value})
                check(response, NAMED_AS.get(field, field), (path, value))


@pytest.mark.advisory("CVE-2026-54235")
@every
async def test_no_field_takes_what_is_no_json(every: int, http: httpx.AsyncClient) -> None:
    async with victim(http):
        for index, (path, field) in enumerate(CASES):
            for literal in LITERALS[index % every :: every]:
                raw = json.dumps({**ROUTES[path][1], field: "@"}).encode().replace(b'"@"', literal)
                response = await http.post(path, content=raw, headers={"content-type": "application/json"})
                assert response.status_code in {400, 404}, (path, field, literal[:20], response.text[:200])
                check(response, None, literal[:20])


OVER: list[tuple[str, str, Any]] = [
    ("/v1/completions", "n", 129),
    ("/v1/completions", "best_of", 129),
    ("/v1/completions", "prompt", ["a"] * 1025),
    ("/v1/completions", "prompt_embeds", ["AA=="] * 1025),
    ("/v1/completions", "stop", ["a"] * 65),
    ("/v1/completions", "stop", ["a" * 2000]),
    ("/v1/completions", "bad_words", ["a"] * 257),
    ("/v1/completions", "stop_token_ids", [5] * 257),
    ("/v1/completions", "logit_bias", {str(token): 1 for token in range(VOCABULARY >> 4)}),
    ("/v1/completions", "allowed_token_ids", [5] * (VOCABULARY >> 4)),
    ("/v1/completions", "logits_processors", ["a"] * 17),
    ("/v1/completions", "metadata", {"a": "b" * 20_000}),
    ("/v1/completions", "cache_salt", "a" * 257),
    ("/v1/completions", "use_beam_search", True),
    ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}] * 1025),
    ("/v1/chat/completions", "messages", TALK * 20_000),
    ("/v1/chat/completions", "top_logprobs", 21),
]


@pytest.mark.advisory("CVE-2024-8939", "CVE-2026-73559")
async def test_lists_over_their_limits(http: httpx.AsyncClient) -> None:
    async with victim(http):
        for path, field, value in OVER:
            extra = {"use_beam_search": {"n": 129}, "top_logprobs": {"logprobs": True}}.get(field, {})
            response = await http.post(path, json={**ROUTES[path][1], field: value, **extra})
            named = {"use_beam_search": "n", "prompt_embeds": "prompt"}.get(field, field)
            assert response.status_code in {400, 403}, (path, field, response.text[:200])
            check(response, named, field)


@pytest.mark.advisory("CVE-2025-62164", "CVE-2025-61620")
async def test_features_that_are_off(http: httpx.AsyncClient) -> None:
    for path, extra in (
        ("/v1/completions", {"prompt": None, "prompt_embeds": "AAAA"}),
        ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}),
    ):
        response = await http.post(path, json={**ROUTES[path][1], **extra})
        assert response.status_code == 403, response.text
        check(response, [*extra][-1], extra)


@pytest.mark.advisory("vllm-issue-54195")
async def test_token_ids_out_of_range(http: httpx.AsyncClient) -> None:
    base = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    async with victim(http):
        for token in (-1, VOCABULARY, 2**31, 2**63 - 1):
            for field in ("stop_token_ids", "allowed_token_ids", "prompt"):
                response = await http.post("/v1/completions", json={**base, field: [token]})
                assert response.status_code == 400, (field, token, response.text)
                check(response, field, token)
            response = await http.post("/v1/completions", json={**base, "logit_bias": {str(token): 1}})
            assert response.status_code == 400
            check(response, "logit_bias", token)
            response = await http.post("/detokenize", json={"tokens": [token]})
            assert response.status_code == 400, (token, response.text)


@pytest.mark.advisory("CVE-2026-73559")
async def test_hostile_bodies(http: httpx.AsyncClient) -> None:
    async with victim(http):
        for raw in RAW:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                response = await http.post(path, content=raw, headers={"content-type": "application/json"})
                assert 400 <= response.status_code < 500, (path, raw[:40], response.text[:300])
                check(response, None, raw[:40])


async def test_hostile_conversations(http: httpx.AsyncClient) -> None:
    long = "a " * 4000
    messages: list[Any] = [
        *([], [{}], [{"role": "user"}], [{"role": 3, "content": "a"}], [{"role": "user", "content": 3}]),
        *([{"role": "nobody", "content": "a"}], [{"role": "user", "content": [{"type": "image_url"}]}], [1], "x"),
        *([{"role": "user", "content": long}], [{"role": "user", "content": [{"type": "text", "text": 3}]}]),
        *([{"role": "tool", "content": "a"}], [{"role": "assistant", "tool_calls": [{}]}], {"role": "user"}),
    ]
    async with victim(http):
        for given in messages:
            response = await http.post("/v1/chat/completions", json={"messages": given, "max_tokens": 2})
            check(response, None, given)
        extras: list[dict[str, Any]] = [
            {"chat_template": "{{ 1 }}"},
            {"chat_template_kwargs": {"messages": []}},
            {"documents": [{"a": 10**30}]},
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
        ]
        for extra in extras:
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **extra}
            response = await http.post("/v1/chat/completions", json=body)
            assert 400 <= response.status_code < 500, (extra, response.text)
            check(response, None, extra)


@pytest.mark.advisory("CVE-2024-8768")
async def test_prompts_without_tokens_and_too_long(http: httpx.AsyncClient) -> None:
    for prompt in ("", [], [[]], [""], ["a", ""], "a " * 4000, [5] * 256, [5] * 100_000):
        response = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 400, (str(prompt)[:40], response.text)
        check(response, "prompt", str(prompt)[:40])


COERCED: list[tuple[str, bytes]] = [  # what a lenient validator would take, or choke on
    *(("max_tokens", raw) for raw in (b'"12"', b"true", b'"2026-11-22"', b"1e2000", b"12.5", b"1" + b"0" * 400)),
    *(("temperature", raw) for raw in (b'"0.5"', b"false", b'"NaN"', b'"1e400"', b'"' + b"9" * 100_000 + b'"')),
    *(("stream", raw) for raw in (b'"yes"', b"1", b"0.0")),
    *(("logit_bias", raw) for raw in (b'{"1": "5"}', b'{"__class__": 1}', b'{"1": true}', b"[[1, 2]]")),
    ("stop", b"[" * 60 + b'"x"' + b"]" * 60),
    ("prompt", b'[["1", 2], [true], [{"__class__": "x"}]]'),
]


@pytest.mark.parametrize(("field", "raw"), COERCED)
async def test_nothing_is_coerced(http: httpx.AsyncClient, field: str, raw: bytes) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2} | {field: "HERE"}).encode()
    answer = await http.post("/v1/completions", content=body.replace(b'"HERE"', raw), headers=JSON)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])
    assert not LEAKS.search(answer.text)


async def test_many_and_odd_names_are_named_and_not_set(http: httpx.AsyncClient) -> None:
    odd = {"__class__": 1, "__dict__": {}, "model_config": {}, "model_fields_set": [], "__init__": "x"}
    many = {f"field{number}": number for number in range(10_000)}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    answer = await http.post("/v1/completions", json=body | odd | many)
    assert answer.status_code == 200, answer.text
    told = answer.headers["x-ferrule-ignored-fields"]
    assert told.startswith("__class__, __dict__, model_config, model_fields_set, __init__, field0")
    assert len(told) < 1000
