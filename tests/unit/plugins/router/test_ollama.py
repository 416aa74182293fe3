"""Ollama's routes over a scripted service: every field's bad values, notes, parameters, conversations, failures."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ferrule.errors import OverloadedError, RequestFailed, UnavailableError
from ferrule.interfaces.service import ChatPrompt, Prompt
from ferrule_plugins.router.ollama.schema import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from tests.fakes.http import Site
from tests.unit.plugins.router.test_openai import WRONG

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": False}
ASK: dict[str, Any] = {"model": "fake", "prompt": "hello", "stream": False}
EMBED: dict[str, Any] = {"model": "fake", "input": ["abba", "cd"]}
BODIES = {
    "/api/chat": (CHAT, OllamaChatBody),
    "/api/generate": (ASK, OllamaGenerateBody),
    "/api/embed": (EMBED, OllamaEmbedBody),
}
FIELDS = [(path, field) for path, (_, body) in BODIES.items() for field in sorted(body.model_fields)]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def send(site: Site, path: str = "/api/chat", **fields: Any) -> httpx.Response:
    return await site.http.post(path, json=BODIES[path][0] | fields)


def error_of(response: httpx.Response, status: int = 400) -> str:
    """Return the error of an answer that must be one, in Ollama's form."""
    found = response.json()
    assert response.status_code == status, response.text
    assert set(found) == {"error"}
    return str(found["error"])


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize(("path", "field"), FIELDS)
async def test_no_value_of_any_field_is_our_fault(path: str, field: str) -> None:
    site = Site(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    messages = [[{"role": role, "content": value}] for role in ("tool", "assistant", "x") for value in ("", "a", 5)]
    for value in [*WRONG, "a" * 20_000, *messages, [CHAT["messages"][0] | {"tool_calls": [{"function": {}}]}]]:
        response = await send(site, path, **{field: value})
        if response.status_code != 200:
            assert response.status_code in {400, 404}, (field, value, response.text)
            assert "aaaaaaaa" not in error_of(response, response.status_code)


@pytest.mark.parametrize(("path", "field"), FIELDS)
async def test_null_is_the_same_as_absent(path: str, field: str) -> None:
    response = await send(Site(), path, **{field: None})
    if BODIES[path][1].model_fields[field].is_required():
        assert error_of(response) == f"{field} is required."
    elif field != "stream":
        assert (response.status_code, "ferrule" in response.json()) == (200, False)


@pytest.mark.parametrize("option", sorted(OllamaOptions.model_fields))
async def test_options_are_used_told_or_refused(option: str) -> None:
    site, strict = Site(), Site(strict_requests=True)
    for value in (*WRONG, "nan", 7, 0.5):
        response = await send(site, options={option: value})
        if response.status_code == 400:
            assert option in error_of(response)
        elif f"options.{option}" in response.text:
            assert response.headers["x-ferrule-ignored-fields"] == f"options.{option}"
            assert f"options.{option}" in error_of(await send(strict, options={option: value}))
        else:
            assert (await send(strict, options={option: value})).status_code == 200


@pytest.mark.parametrize(
    "text", [b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"top_k": 1' + b"0" * 400 + b"}"]
)
async def test_numbers_that_are_none(text: bytes) -> None:
    body = json.dumps(CHAT).encode()[:-1] + b', "options": ' + text + b"}"
    error_of(await Site().http.post("/api/chat", content=body))


async def test_options_and_formats_reach_the_service() -> None:
    site = Site()
    site.service.defaults = {"top_p": 0.5, "top_k": 3, "max_tokens": 9}
    options = {"temperature": 0, "top_k": 7, "stop": "x", "repeat_penalty": 1.5, "seed": 4, "min_p": 0.1}
    await send(site, options=options, format="json")
    params = site.last.params
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.seed) == (0, 0.5, 7, "x", 4)
    assert (params.repetition_penalty, params.min_p, params.max_tokens, params.logprobs) == (1.5, 0.1, 9, None)
    assert site.last.grammar is not None
    assert site.last.grammar.form.schema == {"type": "object"}  # type: ignore[union-attr]
    for asked, most in ((-1, None), (-2, None), (0, None), (5, 5), (256, None), (1 << 40, None)):
        await send(site, options={"num_predict": asked}, format="")
        assert (site.last.params.max_tokens, site.last.grammar) == (most, None)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await send(site, "/api/generate", format=schema, logprobs=True, top_logprobs=2)
    assert site.last.grammar is not None
    assert (site.last.grammar.form.schema, site.last.params.logprobs) == (schema, 2)  # type: ignore[union-attr]
    deep: Any = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    for wrong in ("xml", 5, ["json"]):
        assert error_of(await send(site, format=wrong)).startswith("format must be")
    error_of(await send(site, format=deep))


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, None),
        (False, {"enable_thinking": False, "thinking": False}),
        (True, {"enable_thinking": True, "thinking": True}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ],
)
async def test_thinking_sets_variables_of_the_template(think: Any, variables: Any) -> None:
    for path in ("/api/chat", "/api/generate"):
        site = Site()
        answer = await send(site, path, think=think)
        (prompt,) = site.last.prompts
        assert isinstance(prompt, ChatPrompt)
        assert prompt.chat_template_kwargs == variables
        assert ("no reasoning parser" in answer.text) is bool(think)
    assert "think" in error_of(await send(Site(), think="very"))


async def test_calls_and_results_find_each_other() -> None:
    """Give ids to calls, by their place; a result is that of its function's first open call, or names its call."""
    site = Site(enable_auto_tool_choice=True, tool_call_parser="hermes")
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "sub", "add")]
    messages = [
        {"role": "user", "content": "Compute."},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "sub", "content": "second"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "tool_call_id": "call00002", "content": "third"},
        {"role": "tool", "tool_name": "mul", "content": "of none"},
        {"role": "assistant", "tool_calls": [{"id": "mine", "function": {"name": "add"}}]},
        {"role": "tool", "tool_call_id": "mine", "content": "3"},
    ]
    assert (await send(site, messages=messages, tools=[ADD])).status_code == 200
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools, site.last.tools) == ((ADD,), (ADD,))
    told = [{name: value for name, value in each.items() if name != "role"} for each in prompt.messages]
    assert [call["id"] for call in told[1]["tool_calls"]] == ["call00000", "call00001", "call00002"]
    assert (told[1]["content"], told[1]["thinking"]) == (None, "Hm.")
    assert told[2] == {"content": "second", "tool_call_id": "call00001", "name": "sub"}
    assert told[3] == {"content": "first", "tool_call_id": "call00000", "name": "add"}
    assert told[4] == {"content": "third", "tool_call_id": "call00002", "name": "add"}
    assert told[5] == {"content": "of none", "name": "mul"}
    assert told[6]["tool_calls"][0]["id"] == told[7]["tool_call_id"] == "mine"
    assert prompt.add_generation_prompt
    await send(site, messages=[*messages, {"role": "assistant", "content": "It is"}], tools=[])
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.continue_final_message, prompt.add_generation_prompt, prompt.tools) == (True, False, None)


async def test_what_is_refused() -> None:
    site = Site()
    assert "--enable-auto-tool-choice" in error_of(await send(site, tools=[ADD]))
    picture = [CHAT["messages"][0] | {"images": ["aGk="]}]
    assert "messages[0].images must be empty" in error_of(await send(site, messages=picture))
    assert (await send(site, messages=[CHAT["messages"][0] | {"images": []}])).status_code == 200
    for fields in ({"images": ["aGk="]}, {"template": "{{ .Prompt }}"}, {"width": 5}):
        assert "not in this build" in error_of(await send(site, "/api/generate", **fields))
    for fields in ({"system": "Be brief."}, {"context": [1]}):
        (name,) = fields
        assert error_of(await send(site, "/api/generate", raw=True, **fields)).startswith(name)
    many = [CHAT["messages"][0]] * 20_000
    assert "at most 16384" in error_of(await send(site, messages=many))
    for model in ("other", "fake:7b", "latest", ":latest"):
        error_of(await send(site, model=model), 404)
    for model in ("fake:latest", "alias"):
        assert (await send(site, model=model)).status_code == 200
    for context in ([-1], [1 << 40], [1 << 62] * 5):
        assert error_of(await send(site, "/api/generate", context=context)).startswith("context holds")
    assert "context" in error_of(await send(site, "/api/generate", context=[1] * 100_000))
    error_of(await site.http.post("/api/show", json={}))
    error_of(await site.http.post("/api/show", json={"name": "other"}), 404)


async def test_prompts_of_generate() -> None:
    site = Site()
    await send(site, "/api/generate", system="Be brief.")
    (prompt,) = site.last.prompts
    assert isinstance(prompt, ChatPrompt)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    raw = await send(site, "/api/generate", raw=True, think=True)
    assert (site.last.prompts, site.last.raw, "context" in raw.json()) == ((Prompt(text="hello"),), True, False)
    assert "think: has no effect with raw." in raw.json()["ferrule"]["warnings"]
    await send(site, "/api/generate", suffix="you")
    assert (site.last.prompts, site.last.raw) == ((Prompt(text="hello", suffix="you"),), True)


async def test_a_context_is_what_was_said() -> None:
    """Answer with the ids of prompt and answer, which a next prompt follows."""
    for stream in (False, True):
        site = Site()
        first = await send(site, "/api/generate", stream=stream, options={"num_predict": 2})
        context = (lines_of(first)[-1] if stream else first.json())["context"]
        assert "".join(map(chr, context)) == "hellohe"
        await send(site, "/api/generate", prompt="you", context=context, stream=stream)
        (prompt,) = site.last.prompts
        assert isinstance(prompt, Prompt)
        assert "".join(map(chr, prompt.ids or ())) == "helloheyou"


@pytest.mark.parametrize(("path", "said"), [("/api/chat", "message"), ("/api/generate", "response")])
async def test_loading_is_answered_at_once(path: str, said: str) -> None:
    site = Site()
    nothing = {"messages": []} if path == "/api/chat" else {"prompt": ""}
    for stream in (False, True):
        loaded = (await send(site, path, stream=stream, **nothing)).json()
        assert (loaded["done"], loaded["done_reason"], loaded["model"]) == (True, "load", "fake")
        assert loaded[said] in ("", {"role": "assistant", "content": ""})
    unloaded = (await send(site, path, keep_alive=0, **nothing)).json()
    assert unloaded["done_reason"] == "unload"
    assert "keep_alive" in unloaded["ferrule"]["warnings"][0]
    assert site.service.requests == []


async def test_a_stream_says_what_the_whole_says() -> None:
    for path, body in (("/api/chat", {"logprobs": True, "top_logprobs": 2}), ("/api/generate", {"colour": 1})):
        whole = (await send(Site(), path, **body)).json()
        lines = lines_of(await send(Site(), path, stream=True, **body))
        assert [line["done"] for line in lines] == [False] * 5 + [True]
        texts = [line.get("response", line.get("message", {}).get("content")) for line in lines]
        assert "".join(texts) == whole.get("response", whole.get("message", {}).get("content")) == "hello"
        end = lines[-1]
        for name in ("done_reason", "prompt_eval_count", "eval_count", "load_duration", "context"):
            assert end.get(name) == whole.get(name)
        assert (end["done_reason"], end["prompt_eval_count"], end["eval_count"]) == ("length", 5, 5)
        for found in (end, whole):
            assert found["total_duration"] >= found["prompt_eval_duration"] > 0
            assert found["eval_duration"] > 0
        assert [entry for line in lines for entry in line.get("logprobs", [])] == whole.get("logprobs", [])
        assert ("ferrule" in lines[0], "ferrule" in whole) == ("colour" in body, "colour" in body)
        assert not any("ferrule" in line for line in lines[1:])
        assert all(line["model"] == "fake" and line["created_at"].endswith("Z") for line in lines)
    likely = (await send(Site(), logprobs=True, top_logprobs=1)).json()["logprobs"][0]
    top = {"token": "A", "logprob": -1.0, "bytes": [65]}
    assert likely == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": [top]}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (OverloadedError("The queue is full."), 429),
        (UnavailableError("The server is starting."), 503),
        (RequestFailed("It failed."), 500),
    ],
)
async def test_failures_before_and_within_a_stream(failure: Any, status: int) -> None:
    site = Site()
    site.service.refusal = failure
    response = await send(site)
    assert error_of(response, status) == failure.message
    assert ("retry-after" in response.headers) is (status in {429, 503})
    site.service.refusal, site.service.failure = None, failure
    broken = await send(site, stream=True)
    *_, last = lines_of(broken)
    assert (broken.status_code, last) == (200, {"error": failure.message})
    error_of(await send(site), status)


async def test_vectors() -> None:
    site = Site()
    answer = (await send(site, "/api/embed")).json()
    assert answer["embeddings"] == [[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    assert answer["prompt_eval_count"] == 6
    short = (await send(site, "/api/embed", input="abba", dimensions=2, truncate=False)).json()
    assert short["embeddings"] == [pytest.approx([2**-0.5, 2**-0.5])]
    assert (await send(site, "/api/embed", input=[])).json()["embeddings"] == []
    for length in (300, 30_000):
        assert (await send(site, "/api/embed", input="a" * length)).json()["embeddings"] == [[256.0, 0.0, 0.0, 0.0]]
    one = await site.http.post("/api/embeddings", json={"model": "fake", "prompt": "abba"})
    assert one.json() == {"embedding": [2.0, 2.0, 0.0, 0.0]}
    assert (await site.http.post("/api/embeddings", json={"model": "fake"})).json() == {"embedding": []}


async def test_models_as_ollama_lists_them() -> None:
    site = Site(enable_auto_tool_choice=True, tool_call_parser="hermes")
    site.service.defaults = {"top_p": 0.5, "repetition_penalty": 1.1}
    listed, running = (await site.http.get("/api/tags")).json(), (await site.http.get("/api/ps")).json()
    for found in (listed, running):
        assert [model["name"] for model in found["models"]] == ["fake", "alias"]
        assert {model["details"]["family"] for model in found["models"]} == {"fake"}
    assert running["models"][0]["context_length"] == 256
    shown = (await site.http.post("/api/show", json={"name": "alias:latest", "verbose": True})).json()
    assert shown["model_info"]["fake.context_length"] == 256
    assert {"completion", "tools"} <= set(shown["capabilities"])
    assert [line.split() for line in shown["parameters"].splitlines()] == [["top_p", "0.5"], ["repeat_penalty", "1.1"]]
    assert shown["ferrule"]["warnings"] == ["verbose: vocabularies are not shown."]
    assert (await site.http.get("/")).text == "Ollama is running"
    assert (await site.http.head("/")).status_code == 200
    assert (await site.http.get("/api/version")).json()["version"].startswith("0.")


async def test_the_router_can_be_left_out() -> None:
    site = Site(routers=("openai", "docs", "health"))
    for path in ("/api/chat", "/"):
        response = await site.http.get(path)
        assert response.status_code == 404
        assert "The router ollama serves it" in response.text
