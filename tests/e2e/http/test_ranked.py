"""Beam search, best_of and prompts as embeddings on a real server, against transformers on the same weights."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import pytest
import torch

from ferrule_testkit.checkpoints import tiny_model
from tests.fakes.serving import Here

PROMPT = [5, 100, 60, 200, 31, 17, 250, 9, 9, 80, 41, 7, 120, 66, 33, 12, 90, 3]


@pytest.fixture(scope="module")
def url(generous_server: Here) -> str:
    return generous_server.url


def complete(url: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "return_token_ids": True, **body}, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("width", "n", "penalty", "early"), [(3, 3, 1.0, False), (4, 2, 0.5, True), (2, 1, 1.0, False)]
)
def test_beams_over_http_are_those_of_transformers(url: str, width: int, n: int, penalty: float, early: bool) -> None:
    model: Any = tiny_model("llama")
    stops = list(range(40, 60))
    theirs = model.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=20,
        do_sample=False,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=stops,
        pad_token_id=299,
    )
    expected = [[token for token in row[len(PROMPT) :].tolist() if token != 299] for row in theirs]
    body = {
        "prompt": PROMPT,
        "use_beam_search": True,
        "n": n,
        "best_of": width,
        "temperature": 0,
        "max_tokens": 20,
        "length_penalty": penalty,
        "early_stopping": early,
        "ignore_eos": True,
        "stop_token_ids": stops,
    }
    answer = complete(url, **body)
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    body |= {"model": "tiny", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240) as streamed:
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == n + 1


def test_the_best_of_many_has_the_highest_sum(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "logprobs": 0, "ignore_eos": True}
    drawn = complete(url, **body, n=6)["choices"]
    best = complete(url, **body, n=2, best_of=6)
    drawn.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["token_ids"] for choice in best["choices"]] == [choice["token_ids"] for choice in drawn[:2]]
    assert best["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_mean_what_their_ids_mean(url: str, dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama")
    table = model.get_input_embeddings().weight.detach()
    embeds = table[torch.tensor(PROMPT)].to(dtype)
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    theirs = model.generate(
        inputs_embeds=embeds.float()[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for _ in range(2):  # the second time from the prefix cache
        answer = complete(url, prompt="", prompt_embeds=saved(embeds), **body)
        assert answer["choices"][0]["token_ids"] == theirs[0].tolist()
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    if dtype == torch.float32:
        other = complete(url, prompt=PROMPT, prompt_embeds=[saved(embeds), saved(embeds.flip(0))], **body)
        first, flipped, ids = (choice["token_ids"] for choice in other["choices"])
        assert first == ids != flipped
        beams = {"use_beam_search": True, "n": 3, **body}
        by_ids, by_embeds = complete(url, prompt=PROMPT, **beams), complete(url, prompt_embeds=saved(embeds), **beams)
        assert [c["token_ids"] for c in by_ids["choices"]] == [c["token_ids"] for c in by_embeds["choices"]]


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("prompt_embeds", saved(torch.randn(4, 63)), 400),
        ("prompt_embeds", saved(torch.randn(4, 64).to_sparse()), 400),
        ("prompt_embeds", "AAAA", 400),
        ("temperature", 0.5, 400),
        ("top_p", 0.5, 400),
        ("length_penalty", 100, 400),
        ("best_of", 1000, 400),
        ("suffix", "x", 400),
    ],
)
def test_what_cannot_be_done_names_its_field(url: str, field: str, value: Any, status: int) -> None:
    body = {"model": "tiny", "prompt": "x", "use_beam_search": field != "prompt_embeds", "temperature": 0, field: value}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
