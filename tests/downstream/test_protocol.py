"""A protocol of a stranger: its route, its notation for calls and its logits processor, in the real server.

None of the package's code deals with keys, limits or the shape of errors: they hold all the same.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ferrule_testkit import server as servers

KEY = "open sesame"
LIMIT = 20_000
ABILITIES = [{"name": "weather", "takes": {"city": "string", "days": "integer"}}, {"name": "now"}]
SCRIPT = 'Let me look: @call weather(city="Köln (\\"Süd\\")", days=3) and @call now() it is. @call nobody(x=1) @'
SAID = "Let me look:  and  it is. @call nobody(x=1) @"
ACTIONS = [
    {"do": "weather", "with": {"city": 'Köln ("Süd")', "days": 3}},
    {"do": "now", "with": {}},
]


@pytest.fixture(scope="module")
def server(tiny_llama: Path, installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--num-gpu-blocks-override", "512"]
    args += ["--plugins-allow", "acme-protocol", "--routers", "openai", "health", "docs", "acme"]
    args += ["--enable-auto-tool-choice", "--tool-call-parser", "acme", "--logits-processor-pattern", "acme_.*"]
    args += ["--api-key", KEY, "--max-body-bytes", str(LIMIT)]
    log = tmp_path_factory.mktemp("protocol") / "log"
    with servers.running(args, log, installed.environment("acme_protocol")) as running:
        yield running


def ask(server: servers.Server, body: Any, key: str | None = KEY, method: str = "POST") -> tuple[int, str]:
    """Return status and text of POST /acme/v1/ask."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{server.url}/acme/v1/ask", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=240) as response:
            return int(response.status), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_answers(server: servers.Server) -> None:
    status, text = ask(server, {"question": "What is the capital of France?", "most": 9})
    answer = json.loads(text)
    assert (status, answer["actions"], answer["tokens"]) == (200, [], 9)
    assert (answer["done"], bool(answer["answer"])) == ("length", True)


def test_calls_in_its_notation_become_actions(server: servers.Server) -> None:
    body = {"question": "What is it like?", "abilities": ABILITIES, "rehearse": SCRIPT}
    answer = json.loads(ask(server, body)[1])
    assert (answer["answer"], answer["actions"]) == (SAID, ACTIONS)

    status, text = ask(server, body | {"live": True})
    *lines, last = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    assert (status, last) == (200, "[DONE]")
    assert any("say" in event for event in events)
    assert "".join(event.get("say", "") for event in events) == SAID
    assert [event for event in events if "do" in event] == ACTIONS
    assert events[-1] == {"done": "length", "tokens": answer["tokens"]}


def test_without_abilities_there_are_no_calls(server: servers.Server) -> None:
    answer = json.loads(ask(server, {"question": "What is it like?", "rehearse": SCRIPT})[1])
    assert (answer["answer"], answer["actions"]) == (SCRIPT, [])


def test_the_built_in_protocol_reads_its_notation_too(server: servers.Server, tiny_llama: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(SCRIPT).ids
    tools = [
        {"type": "function", "function": {"name": ability["name"], "parameters": {"type": "object"}}}
        for ability in ABILITIES
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=240) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "What is it like?"}],
            tools=tools,
            max_tokens=len(ids),
            extra_body={"logits_processors": [{"qualname": "acme_rehearsal", "kwargs": {"ids": ids}}]},
        )
    message = answer.choices[0].message
    assert message.content == SAID
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    assert calls == [(action["do"], action["with"]) for action in ACTIONS]


@pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x"])
def test_nobody_gets_in_without_a_key(key: str | None, server: servers.Server) -> None:
    status, text = ask(server, {"question": "Who am I?"}, key)
    assert (status, json.loads(text)["error"]["code"]) == (401, 401)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b'"question"', 400, None),
        ({}, 400, "question"),
        ({"question": ""}, 400, "question"),
        ({"question": 3}, 400, "question"),
        ({"question": "a", "most": 0}, 400, "most"),
        ({"question": "a", "most": 10**30}, 400, None),
        ({"question": "a", "abilities": [{"name": ""}]}, 400, "abilities[0].name"),
        (b'{"question":' + b"[" * 200 + b"]" * 200 + b"}", 400, None),
        ({"question": "word " * 2000}, 400, "messages"),
        ({"question": "a" * LIMIT}, 413, None),
    ],
)
def test_bad_bodies_are_answered_for_it(body: Any, status: int, param: str | None, server: servers.Server) -> None:
    got, text = ask(server, body)
    error = json.loads(text)["error"]
    assert (got, set(error), error["code"]) == (status, {"message", "type", "param", "code"}, status)
    assert param is None or error["param"] == param


def test_other_methods_are_refused_and_the_neighbours_live(server: servers.Server) -> None:
    assert ask(server, b"", method="GET")[0] == 405
    assert ask(server, {"question": "Still there?", "most": 2})[0] == 200
    assert server.health() == 200


def test_it_is_described(server: servers.Server) -> None:
    request = urllib.request.Request(f"{server.url}/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=240) as response:
        page = json.load(response)
    assert page["paths"]["/acme/v1/ask"]["post"]["summary"] == "Ask a question."
    assert "Ability" in json.dumps(page)


@pytest.mark.parametrize(
    ("extra", "variable", "reason"),
    [
        (["--plugins-deny", "acme-protocol"], None, "denied by --plugins-deny acme-protocol"),
        ([], "acme-other", "FERRULE_PLUGINS"),
    ],
)
def test_it_is_served_only_if_it_may(
    extra: list[str], variable: str | None, reason: str, tiny_llama: Path, installed: Any, tmp_path: Path
) -> None:
    environment = installed.environment("acme_protocol") | ({"FERRULE_PLUGINS": variable} if variable else {})
    args = [str(tiny_llama), "--routers", "acme", "health", *extra]
    with servers.started(args, tmp_path / "log", environment) as refused:
        assert refused.process.wait(240) == 1
    assert "acme-protocol" in refused.text()
    assert reason in refused.text()
