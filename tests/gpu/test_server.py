"""`ferrule serve` on a GPU, as its users see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from ferrule_testkit import server as servers


@pytest.fixture(scope="module")
def client(
    device: str, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("server") / "log"
    args = [str(checkpoint("llama")), "--served-model-name", "tiny", "--device", device, "--dtype", "float32"]
    with servers.running([*args, "--gpu-memory-utilization", "0.3", "--num-gpu-blocks-override", "256"], log) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_many_completions_at_once_are_each_the_one_alone(client: openai.OpenAI) -> None:
    def complete(prompt: str) -> str:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
        return answer.choices[0].text

    prompts = [f"Prompt number {n}: " + "the quick brown fox " * (n % 5) for n in range(24)]
    alone = [complete(prompt) for prompt in prompts[:6]]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(complete, prompts))
    assert together[:6] == alone


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "temperature": 0.8,
        "seed": 3,
    }
    whole = client.chat.completions.create(**asked)
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 16


def test_logprobs_are_there(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="The", max_tokens=4, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
