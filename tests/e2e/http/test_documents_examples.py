"""The documents' own HTTP examples, word for word, against the embedded model; and each extra parameter they list.

Examples of features that this build does not have must fail with a word that names the feature.
"""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.serving import Here, serving_here

MODEL = "NousResearch/Meta-Llama-3-8B-Instruct"
OTHER = "unsloth/Llama-3.2-1B-Instruct"
SERVE = f"vllm serve {MODEL} --dtype auto --api-key token-abc123"
CLIENT = """
from openai import OpenAI
client = OpenAI(
    base_url="http://localhost:8000/v1",
    api_key="token-abc123",
)
"""
HELLO = """
completion = client.chat.completions.create(
  model="NousResearch/Meta-Llama-3-8B-Instruct",
  messages=[
    {"role": "user", "content": "Hello!"}
  ]
)

print(completion.choices[0].message)
"""
GUIDED = """
completion = client.chat.completions.create(
  model="NousResearch/Meta-Llama-3-8B-Instruct",
  messages=[
    {"role": "user", "content": "Classify this sentiment: vLLM is wonderful!"}
  ],
  extra_body={
    "guided_choice": ["positive", "negative"]
  }
)
"""
METRICS = "curl http://0.0.0.0:8000/metrics"

# Field, documented default, another value. Chat and completions have these in common.
COMMON: list[tuple[str, Any, Any]] = [
    ("use_beam_search", False, True),
    ("top_k", -1, 3),
    ("min_p", 0.0, 0.5),
    ("repetition_penalty", 1.0, 1.2),
    ("length_penalty", 1.0, 2.0),
    ("early_stopping", False, True),
    ("stop_token_ids", [], [5]),
    ("include_stop_str_in_output", False, True),
    ("ignore_eos", False, True),
    ("min_tokens", 0, 2),
    ("skip_special_tokens", True, False),
    ("spaces_between_special_tokens", True, False),
    ("truncate_prompt_tokens", None, 2),
    ("prompt_logprobs", None, 1),
]
GUIDES: list[tuple[str, Any, Any]] = [
    ("guided_json", None, {"type": "object"}),
    ("guided_regex", None, "a+"),
    ("guided_choice", None, ["a", "b"]),
    ("guided_grammar", None, 'root ::= "a"'),
    ("guided_decoding_backend", None, "outlines"),
    ("guided_whitespace_pattern", None, " "),
]
CHAT: list[tuple[str, Any, Any]] = [
    ("best_of", None, 2),
    *COMMON,
    ("echo", False, True),
    ("add_generation_prompt", True, False),
    ("add_special_tokens", False, True),
    ("documents", None, [{"title": "a", "text": "b"}]),
    ("chat_template", None, "{{ messages[0].content }}"),
    ("chat_template_kwargs", None, {"enable_thinking": False}),
    *GUIDES,
]
COMPLETIONS: list[tuple[str, Any, Any]] = [
    *COMMON,
    ("allowed_token_ids", None, [5, 6]),
    ("add_special_tokens", True, False),
    ("response_format", None, {"type": "json_object"}),
    *GUIDES,
]
REFUSED = {  # of the values above: the status and what the message names
    "chat_template": (403, "--trust-request-chat-template"),
}
WARNED = {  # without effect: alone, in this conversation, or with the embedded model's template
    "spaces_between_special_tokens",  # while special tokens are left out
    *("length_penalty", "early_stopping", "guided_decoding_backend", "guided_whitespace_pattern", "echo", "documents"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Here]:
    """Run the documents' command, but with the embedded model under the names of the examples."""
    words = shlex.split(SERVE)[3:]
    args = ["--served-model-name", MODEL, OTHER, *words, "--max-model-len", "256"]
    with serving_here(args) as running:
        yield running


def program(script: str, server: Here) -> str:
    """Return an example as it is run; only its address is another."""
    text = script.replace("http://localhost:8000", server.url)
    assert text != script
    return text


def run_here(script: str, server: Here, folder: Path) -> dict[str, Any]:
    """Run an example in this process, where the client is imported already, and return its names."""
    path = folder / "example.py"
    path.write_text(program(script, server))
    return runpy.run_path(str(path))


def test_the_first_example(server: Here) -> None:
    command = [sys.executable, "-c", program(CLIENT + HELLO, server)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ChatCompletionMessage(content=")
    assert "role='assistant'" in done.stdout


def test_the_guided_example(server: Here, tmp_path: Path) -> None:
    completion = run_here(CLIENT + GUIDED, server, tmp_path)["completion"]
    assert completion.choices[0].message.content in {"positive", "negative"}


def test_the_metrics_example(server: Here) -> None:
    url = shlex.split(METRICS)[1].replace("http://0.0.0.0:8000", server.url)
    answer = httpx.get(url, headers={"authorization": "Bearer token-abc123"}, timeout=240)
    assert answer.status_code == 200
    for line in (
        "# TYPE vllm:iteration_tokens_total histogram",
        "vllm:iteration_tokens_total_sum{",
        "vllm:iteration_tokens_total_bucket{",
    ):
        assert line in answer.text
    for bound in ("1.0", "8.0", "16.0", "32.0", "64.0", "128.0", "256.0", "512.0"):
        assert f'le="{bound}"' in answer.text


def post(server: Here, chat: bool, **fields: Any) -> httpx.Response:
    what: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]} if chat else {"prompt": "Hello!"}
    path = "chat/completions" if chat else "completions"
    headers = {"authorization": "Bearer token-abc123"}
    body = {"model": OTHER, "max_tokens": 3, **what, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=240)


@pytest.mark.parametrize(("chat", "table"), [(True, CHAT), (False, COMPLETIONS)])
def test_documented_defaults_are_taken(server: Here, chat: bool, table: list[tuple[str, Any, Any]]) -> None:
    answer = post(server, chat, **{name: default for name, default, _ in table})
    assert answer.status_code == 200, answer.text
    assert "ferrule" not in answer.json()
    assert answer.json()["model"] == MODEL


@pytest.mark.parametrize(("chat", "table"), [(True, CHAT), (False, COMPLETIONS)])
def test_documented_parameters(server: Here, chat: bool, table: list[tuple[str, Any, Any]]) -> None:
    """Check that each has its documented effect, is named in a warning, or is refused with the name of what is
    missing.
    """
    for name, _, value in table:
        answer = post(server, chat, **{name: value})
        if name in REFUSED:
            status, words = REFUSED[name]
            assert answer.status_code == status, (name, answer.text)
            assert answer.json()["error"]["param"].partition(".")[0] == name
            assert words in answer.json()["error"]["message"]
            continue
        assert answer.status_code == 200, (name, answer.text)
        warnings = answer.json().get("ferrule", {"warnings": []})["warnings"]
        assert [text.partition(":")[0] for text in warnings] == ([name] if name in WARNED else []), name


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.jpg"}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
LATER: list[tuple[dict[str, Any], str, str]] = [  # what the documents tell of that later builds bring
    ({"tools": [TOOL]}, "tool_choice", "--enable-auto-tool-choice"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image_url"),
    ({"thinking_token_budget": 10}, "thinking_token_budget", "--reasoning-parser"),
    ({"modalities": ["text", "audio"]}, "modalities", "output other than text"),
]


@pytest.mark.parametrize(("body", "param", "words"), LATER)
def test_features_of_later_builds_are_named(server: Here, body: dict[str, Any], param: str, words: str) -> None:
    answer = post(server, True, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "words"), [("embeddings", "embed"), ("audio/transcriptions", "transcription")])
def test_routes_of_other_tasks_are_named(server: Here, path: str, words: str) -> None:
    headers = {"authorization": "Bearer token-abc123"}
    answer = httpx.post(f"{server.url}/v1/{path}", json={}, headers=headers, timeout=240)
    assert answer.status_code == 404, answer.text
    assert f"needs task {words}" in answer.json()["error"]["message"] or words in answer.json()["error"]["message"]


def test_streams_and_the_key(server: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the first example as a stream, and with a wrong key."""
    streamed = HELLO.replace("  ]\n)", "  ],\n  stream=True,\n)").replace(
        "print(completion.choices[0].message)",
        "print(''.join(chunk.choices[0].delta.content or '' for chunk in completion), end='.')",
    )
    run_here(CLIENT + streamed, server, tmp_path)
    said = capsys.readouterr().out
    assert said.endswith(".")
    assert len(said) > 1
    with pytest.raises(openai.AuthenticationError):
        run_here((CLIENT + HELLO).replace("token-abc123", "token-other"), server, tmp_path)
