"""A folder in Mistral's own form behind the HTTP API: `auto` finds all of it, and conversations need no template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ferrule_plugins.tokenizer.mistral import MistralTokenizers
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.harness import Harness
from ferrule_testkit.tekken import write_tekken
from tests.fakes.serving import serving_here
from tests.mistral_form import mistral_form

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED: list[Any] = [{"role": "user", "content": "Rain?"}]
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "mistral", "--served-model-name", "tiny")
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--num-gpu-blocks-override", "256")
COMPACT = ("--guided-decoding-disable-any-whitespace",)  # a random model would write nothing else


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("mistral")
    own = mistral_form(tiny_checkpoint("llama", base / "llama"), base / "own", max_position_embeddings=1024)
    write_tekken(own)
    return own


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with (
        serving_here([str(folder), *FLAGS, *SMALL, *COMPACT]) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=240) as found,
    ):
        yield found


def ids_of(folder: Path, messages: list[Any]) -> list[int]:
    tokenizer: Any = MistralTokenizers().open(folder, {})
    ids: list[int] = tokenizer.encode_chat(messages, {"tools": [WEATHER]}, continued=False)
    return ids


def test_the_prompt_is_that_of_the_format_and_the_answer_the_model_s(client: openai.OpenAI, folder: Path) -> None:
    expected = ids_of(folder, ASKED)
    url = str(client.base_url).removesuffix("/v1/") + "/tokenize"
    asked = httpx.post(url, json={"model": "tiny", "messages": ASKED, "tools": [WEATHER]}, timeout=240)
    assert asked.json()["tokens"] == expected
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=[WEATHER], temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert answer.usage.prompt_tokens == len(expected)
    with Harness(folder, dtype="float32") as harness:
        ids = harness.engine().run([expected], max_tokens=8)[0].token_ids
    assert answer.choices[0].message.content == MistralTokenizers().open(folder, {}).decode(ids)


def test_calls_go_out_and_results_come_back(client: openai.OpenAI, folder: Path) -> None:
    common: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "temperature": 0, "max_tokens": 120}
    common["parallel_tool_calls"] = False
    choice = client.chat.completions.create(messages=ASKED, tool_choice="required", **common).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    history = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(messages=history, **common | {"max_tokens": 1})
    given = {"id": call.id, "type": "function", "function": {"name": "get_weather"}}
    given["function"]["arguments"] = json.loads(call.function.arguments)
    used = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [given]}, result]
    assert answer.usage.prompt_tokens == len(ids_of(folder, used))


def test_a_conversation_that_the_format_lacks_is_a_request_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Mistral's format") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "critic", "content": "no"}])
    assert caught.value.param == "messages"
