"""Request fields of text generation against the real server: each has the effect that the documents tell."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file

from ferrule_testkit import server as servers
from tests.fakes.serving import Here

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(generous_server: Here) -> Here:
    return generous_server


@pytest.fixture
def http(server: Here) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as found:
        yield found


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": "hello", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello there"}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"prompt": "hello", **body})
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def total(choice: dict[str, Any]) -> float:
    return math.fsum(choice["logprobs"]["token_logprobs"])


# ---------------------------------------------------------------------------------------- several answers


def test_beam_search_finds_the_likelier_and_sorts(http: httpx.Client) -> None:
    greedy = complete(http, logprobs=0)["choices"][0]
    beams = complete(http, use_beam_search=True, n=4, logprobs=0, return_token_ids=True)["choices"]
    scores = [total(choice) for choice in beams]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= total(greedy) - 1e-4
    assert len({tuple(choice["token_ids"]) for choice in beams}) == 4
    one = complete(http, use_beam_search=True, n=1, logprobs=0)["choices"][0]
    assert one["text"] == greedy["text"]
    of_four = complete(http, use_beam_search=True, n=1, best_of=4)["choices"]
    assert [choice["text"] for choice in of_four] == [beams[0]["text"]]


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_beam_search_streams_at_its_end(server: Here, path: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"extra_body": {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}}
        base: dict[str, Any] = {"model": "tiny", "n": 2, "temperature": 0, "max_tokens": 6, **extra}
        texts = ["", ""]
        if path == "chat":
            talk: Any = [{"role": "user", "content": "hello"}]
            whole = [one.message.content for one in client.chat.completions.create(messages=talk, **base).choices]
            for part in client.chat.completions.create(messages=talk, stream=True, **base):
                for one in part.choices:
                    texts[one.index] += one.delta.content or ""
        else:
            whole = [choice.text for choice in client.completions.create(prompt="hello", **base).choices]
            for chunk in client.completions.create(prompt="hello", stream=True, **base):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        assert texts == whole


def test_best_of_returns_the_best(http: httpx.Client) -> None:
    drawn = {"temperature": 1.0, "seed": 7, "logprobs": 0}
    every = complete(http, n=5, **drawn)["choices"]
    best = complete(http, n=2, best_of=5, **drawn)
    ranked = sorted((choice["text"] for choice in sorted(every, key=total, reverse=True)[:2]), key=str)
    assert sorted(choice["text"] for choice in best["choices"]) == ranked
    assert best["usage"]["completion_tokens"] == 40
    assert len(chat(http, n=1, best_of=3, temperature=1.0)["choices"]) == 1
    assert refusal(http, n=3, best_of=2)["param"] == "best_of"


def test_batch_prompts_of_all_four_forms(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    expected = complete(http)["choices"][0]["text"]
    for prompt, count in (("hello", 1), (["hello", "hello"], 2), (ids, 1), ([ids, ids], 2)):
        answer = complete(http, prompt=prompt, n=2)
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
        assert {choice["text"] for choice in answer["choices"]} == {expected}
        assert answer["usage"]["prompt_tokens"] == count * len(ids)


# ---------------------------------------------------------------------------------------- what is generated


def test_length_and_end(http: httpx.Client) -> None:
    ids = complete(http, return_token_ids=True)["choices"][0]["token_ids"]
    stopped = complete(http, stop_token_ids=[ids[3]], return_token_ids=True)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", ids[3])
    assert stopped["token_ids"] == ids[: ids.index(ids[3]) + 1]
    late = complete(http, stop_token_ids=[ids[3]], min_tokens=6, return_token_ids=True)["choices"][0]
    assert len(late["token_ids"]) >= 6
    most = chat(http, max_tokens=2, max_completion_tokens=3)
    assert most["usage"]["completion_tokens"] == 3
    assert refusal(http, min_tokens=9, max_tokens=8)["param"] == "min_tokens"


def test_which_tokens(http: httpx.Client) -> None:
    assert set(complete(http, allowed_token_ids=[40, 41], return_token_ids=True)["choices"][0]["token_ids"]) <= {40, 41}
    forced = complete(http, logit_bias={"42": 100}, return_token_ids=True)["choices"][0]
    assert set(forced["token_ids"]) == {42}
    letters = {"allowed_token_ids": list(range(40, 60)), "max_tokens": 1}
    first = complete(http, **letters)["choices"][0]["text"]
    assert complete(http, **letters, bad_words=[first])["choices"][0]["text"] != first


def test_prompts_are_truncated(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "hello there"}).json()["tokens"]
    cut = complete(http, prompt=ids, truncate_prompt_tokens=2, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[-2:]
    assert complete(http, prompt=ids[-2:])["choices"][0]["text"] == cut["choices"][0]["text"]
    cut = complete(http, prompt=ids, truncate_prompt_tokens=2, truncation_side="right", return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[:2]
    assert refusal(http, truncation_side="middle")["param"] == "truncation_side"


def test_prompt_embeds(http: httpx.Client, tiny_llama: Path) -> None:
    """Send rows of the model's own table instead of the tokens that they belong to."""
    ids = http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    table = next(
        tensors["model.embed_tokens.weight"]
        for tensors in map(load_file, sorted(tiny_llama.glob("*.safetensors")))
        if "model.embed_tokens.weight" in tensors
    )
    buffer = io.BytesIO()
    torch.save(table[ids].clone(), buffer)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    expected = complete(http)["choices"][0]["text"]
    assert complete(http, prompt=None, prompt_embeds=encoded)["choices"][0]["text"] == expected
    both = complete(http, prompt_embeds=[encoded, encoded])["choices"]
    assert [choice["text"] for choice in both] == [expected] * 3
    assert refusal(http, prompt=None, prompt_embeds="not base64!")["param"] == "prompt_embeds"
    # Nothing said token 0, so that a penalty for what was said leaves it alone.
    zero = {"allowed_token_ids": [0, 50], "logit_bias": {"0": 90, "50": 45}, "repetition_penalty": 100, "max_tokens": 1}
    chosen = complete(http, prompt=None, prompt_embeds=encoded, **zero, return_token_ids=True)["choices"][0]
    assert chosen["token_ids"] == [0]
    assert complete(http, prompt=[0], **zero, return_token_ids=True)["choices"][0]["token_ids"] == [50]
    assert refusal(http, prompt=None, prompt_embeds=encoded, prompt_logprobs=0)["param"] == "prompt_logprobs"


def test_suffix_needs_tokens_for_it(http: httpx.Client) -> None:
    assert refusal(http, suffix="world")["param"] == "suffix"


# ---------------------------------------------------------------------------------------- what is told


def test_logprobs_as_ids_and_of_all_tokens(http: httpx.Client) -> None:
    vocabulary = len(complete(http, max_tokens=1, logprobs=-1)["choices"][0]["logprobs"]["top_logprobs"][0])
    assert vocabulary > 100
    named = complete(http, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in named["tokens"])
    entry = chat(http, logprobs=True, top_logprobs=3, max_tokens=1)["choices"][0]["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 3
    assert entry["top_logprobs"][0]["token"] == entry["token"]
    assert isinstance(entry["bytes"], list)


def test_prompt_logprobs(http: httpx.Client) -> None:
    found = complete(http, prompt_logprobs=2, return_token_ids=True)["choices"][0]
    ids = found["prompt_token_ids"]
    assert found["prompt_logprobs"][0] is None
    for token_id, entry in zip(ids[1:], found["prompt_logprobs"][1:], strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
        assert 2 <= len(entry) <= 3
    assert refusal(http, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"
    assert chat(http, prompt_logprobs=0)["prompt_logprobs"][0] is None


@pytest.mark.advisory("CVE-2025-46570")
def test_cached_tokens_and_salts(http: httpx.Client) -> None:
    prompt = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2
    first = complete(http, prompt=prompt, cache_salt="one")["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = complete(http, prompt=prompt, cache_salt="one")["usage"]["prompt_tokens_details"]["cached_tokens"]
    other = complete(http, prompt=prompt, cache_salt="two")["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (first, other) == (0, 0)
    assert again > 0


def test_ids_and_notes(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ferrule")
    answer = http.post(
        "/v1/completions",
        json={"prompt": "a", **GREEDY, "request_id": "mine", "user": "somebody-known", "metadata": {"a": "b"}},
        headers={"x-request-id": "theirs"},
    )
    assert answer.json()["id"] == "cmpl-mine"
    assert answer.headers["x-request-id"] == "theirs"
    assert "ferrule" not in answer.json()
    complete(http, priority=-3, target_first_token_ms=800, target_inter_token_ms=900.5)
    again = complete(http, zzz=1)
    assert again["ferrule"]["warnings"] == ["zzz: unknown, ignored."]
    assert servers.until(lambda: any("somebody-known" in str(vars(record)) for record in caplog.records))
    assert again["system_fingerprint"] == answer.json()["system_fingerprint"]


# ---------------------------------------------------------------------------------------- conversations


def test_templates_of_requests(http: httpx.Client) -> None:
    template = "{{ messages[0].content }}{{ mark }}{% for doc in documents %}[{{ doc.title }}]{% endfor %}"
    found = chat(
        http,
        chat_template=template,
        chat_template_kwargs={"mark": "!"},
        documents=[{"title": "one", "text": "x"}],
        return_prompt_text=True,
    )
    assert found["prompt_text"] == "hello there![one]"


def test_continuing_the_last_message(http: httpx.Client) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
    whole = chat(http, messages=talk, continue_final_message=True, return_prompt_text=True, echo=True)
    assert whole["prompt_text"].endswith("well")
    assert whole["choices"][0]["message"]["content"].startswith("well")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    error = refusal(http, "/v1/chat/completions", messages=talk, **both)
    assert error["param"] == "continue_final_message"


def test_special_tokens(http: httpx.Client) -> None:
    plain = http.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False}).json()["count"]
    special = http.post("/tokenize", json={"prompt": "hello"}).json()["count"]
    for wanted, count in ((False, plain), (True, special)):
        assert complete(http, add_special_tokens=wanted)["usage"]["prompt_tokens"] == count


def test_reasoning_is_accepted_under_both_names(http: httpx.Client) -> None:
    template = "{% for message in messages %}{{ message.reasoning }}{{ message.reasoning_content }}{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        talk = [{"role": "assistant", "content": "a", name: "why"}]
        assert chat(http, messages=talk, chat_template=template, return_prompt_text=True)["prompt_text"] == "whywhy"


def test_models_and_names(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None),
        ("other", "tiny", None),
    ]
    assert complete(http, model="other")["model"] == "tiny"
