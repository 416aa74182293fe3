"""`POST /invocations`, `GET /tokenizer_info`, and what the schemas of bodies say."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ferrule.interfaces.tokenizer import Tokenizer
from ferrule_plugins.router.tokenize import describe
from ferrule_plugins.tokenizer.auto import AutoTokenizers
from tests.fakes.http import Site, chunks, error_of
from tools import ROOT
from tools.pages.http import spec

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT: dict[str, Any] = {"prompt": "hello"}
TINY = ROOT / "contrib_models/ferrule_contrib/tiny/checkpoint"
VARYING = {"id", "created"}


def told(answer: httpx.Response) -> dict[str, Any]:
    found = {name: value for name, value in answer.json().items() if name not in VARYING}
    return found | {"ferrule": sorted(found.get("ferrule", {}).get("warnings", []))}


def ignored(answer: httpx.Response) -> set[str]:
    return {name.strip() for name in answer.headers.get("x-ferrule-ignored-fields", "").split(",")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", TALK),
        ("/v1/chat/completions", {**TALK, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}),
        ("/v1/chat/completions", {**TALK, "suffix": "x", "temperatur": 1}),  # the other kind's, and nobody's
        ("/v1/completions", PROMPT),
        ("/v1/completions", {**PROMPT, "logprobs": 2, "n": 2}),
        ("/v1/completions", {**PROMPT, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": [[97, 98], [99]], "max_tokens": 2}),
    ],
)
async def test_it_answers_as_the_route_of_its_kind(path: str, body: dict[str, Any]) -> None:
    site = Site()
    ours, theirs = await site.http.post("/invocations", json=body), await site.http.post(path, json=body)
    assert (ours.status_code, told(ours)) == (theirs.status_code, told(theirs))
    assert ours.status_code == 200
    assert ignored(ours) == ignored(theirs)


async def test_it_streams() -> None:
    site = Site()
    for body, kind in ((TALK, "chat.completion.chunk"), (PROMPT, "text_completion")):
        answer = await site.http.post("/invocations", json={**body, "stream": True})
        assert {chunk["object"] for chunk in chunks(answer)} == {kind}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "/v1/chat/completions"),
        ({"inputs": "hello"}, "messages", "/v1/completions"),
        ({**TALK, **PROMPT}, "messages", "not both"),
        ({**TALK, "logprobs": 1}, "logprobs", "true or false"),
        ({**PROMPT, "logprobs": True}, "logprobs", "an integer"),
        ({**PROMPT, "temperature": -1}, "temperature", "at least 0"),
        ({"messages": "hello"}, "messages", "a list"),
        ({"prompt": 5}, "prompt", "a string"),
    ],
)
async def test_other_shapes_are_refused(body: dict[str, Any], param: str, words: str) -> None:
    error = error_of(await Site().http.post("/invocations", json=body), 400)
    assert error["param"] == param
    assert words in error["message"]


async def test_strict_requests_hold_for_the_kind() -> None:
    site = Site(strict_requests=True)
    error = error_of(await site.http.post("/invocations", json={**TALK, "suffix": "x"}), 400)
    assert "suffix" in error["message"]


# ---------------------------------------------------------------------------------------- the tokenizer


async def test_tokenizer_info_needs_its_flag() -> None:
    site = Site()
    error = error_of(await site.http.get("/tokenizer_info"), 404)
    assert "--enable-tokenizer-info-endpoint" in error["message"]
    site = Site(enable_tokenizer_info_endpoint=True, chat_template="{{ messages[0].content }}")
    assert "without a tokenizer" in error_of(await site.http.get("/tokenizer_info"), 400)["message"]
    site.service.tokenizer = AutoTokenizers().open(TINY, {})
    told = (await site.http.get("/tokenizer_info")).json()
    assert told["chat_template"] == "{{ messages[0].content }}"
    assert told["tokenizer_class"]


def named(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_what_is_told_of_a_tokenizer() -> None:
    tokenizer = AutoTokenizers().open(TINY, {})
    settings = {"eos_token": {"content": "</s>"}, "vocab_file": "/secret/vocab", "model_max_length": 7}
    tokenizer = named(tokenizer, settings=settings, special_tokens={"eos_token": "</s>"}, chat_template="T")
    assert describe(tokenizer, None) == {
        "eos_token": "</s>",
        "model_max_length": 7,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "T",
    }
    two = named(tokenizer, chat_template={"default": "T", "rag": "R"})
    assert describe(two, None)["chat_template"] == [
        {"name": "default", "template": "T"},
        {"name": "rag", "template": "R"},
    ]
    assert describe(two, "rag")["chat_template"] == "R"
    assert "chat_template" not in describe(named(tokenizer, chat_template=None), None)


# ---------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    "name", ["CompletionBody", "ChatBody", "ChatMessage", "Tool", "Function", "StreamOptions", "TokenizeBody"]
)
def test_every_field_of_a_body_says_what_it_does(name: str) -> None:
    for field, schema in spec()["components"]["schemas"][name]["properties"].items():
        said = schema.get("description", "")
        assert said.endswith("."), field
        assert len(said) < 120, field
