"""Prompt adapters over HTTP, by the official client: names, lists, usage, and a start that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from ferrule.config.parse import parse
from ferrule.errors import ConfigError, exit_status
from ferrule.llm.offline import LLM
from ferrule.plugin import discover
from tests.fakes.serving import serving_here

COUNTS = {"pirate": 5, "poet": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    draw = np.random.default_rng(3)
    for name, count in COUNTS.items():
        (folder / name).mkdir()
        values = draw.normal(size=(count, 64)).astype(np.float32)
        save_file({"prompt_embeddings": values}, folder / name / "adapter_model.safetensors")
        config = f'{{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": {count}, "token_dim": 64}}'
        (folder / name / "adapter_config.json").write_text(config)
    return folder


def words(model: Path, folder: Path, *more: str) -> list[str]:
    served = [f"{name}={folder / name}" for name in COUNTS]
    start = ["--model", str(model), "--served-model-name", "base", "--dtype", "float32", "--enable-prompt-adapter"]
    return [*start, "--num-gpu-blocks-override", "128", "--prompt-adapters", *served, *more]


@pytest.fixture(scope="module")
def client(tiny_llama: Path, folder: Path) -> Iterator[openai.OpenAI]:
    with serving_here(words(tiny_llama, folder, "--max-prompt-adapter-token", "8")) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")


def test_adapters_are_listed_with_their_base(client: openai.OpenAI, folder: Path) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert list(listed) == ["base", *COUNTS]
    assert listed["base"]["parent"] is None
    for name in COUNTS:
        assert (listed[name]["parent"], listed[name]["root"]) == ("base", str(folder / name))
    assert client.models.retrieve("poet").id == "poet"


def test_the_name_of_the_model_chooses_the_adapter(client: openai.OpenAI) -> None:
    def complete(model: str) -> openai.types.Completion:
        return client.completions.create(
            model=model, prompt=list(range(30, 60)), max_tokens=8, temperature=0, logprobs=1, echo=True
        )

    found = {model: complete(model) for model in ("base", *COUNTS, "base", *COUNTS)}
    assert len({answer.choices[0].text for answer in found.values()}) == 3
    for answer in found.values():
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30, 8)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.tokens or []) == len(logprobs.text_offset or []) == 38
        assert (logprobs.text_offset or [1])[0] == 0
        assert (logprobs.token_logprobs or [0.0])[0] is None
    base, pirate = (found[name].choices[0].logprobs for name in ("base", "pirate"))
    assert base is not None
    assert pirate is not None
    assert (base.tokens or [])[:30] == (pirate.tokens or [])[:30]
    assert base.token_logprobs != pirate.token_logprobs


def test_a_chat_takes_an_adapter_in_a_stream(client: openai.OpenAI) -> None:
    def chat(model: str) -> tuple[str, int]:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[-1].usage is not None
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        return "".join(texts), chunks[-1].usage.prompt_tokens

    (plain, length), (adapted, same) = chat("base"), chat("poet")
    assert plain != adapted
    assert length == same


def test_beams_and_several_choices_keep_the_adapter(client: openai.OpenAI) -> None:
    prompt = list(range(30, 50))
    for extra in ({"use_beam_search": True}, {"seed": 1}):
        wanted = {"prompt": prompt, "max_tokens": 6, "n": 2, "extra_body": extra}
        found = {
            model: client.completions.create(model=model, **wanted)  # type: ignore[call-overload]
            for model in ("base", "pirate")
        }
        texts = [[choice.text for choice in found[model].choices] for model in ("base", "pirate")]
        assert texts[0] != texts[1]
        assert found["pirate"].usage.prompt_tokens == len(prompt)


def test_other_names_are_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Valid names: base, pirate, poet"):
        client.completions.create(model="sailor", prompt="x")


@pytest.mark.parametrize(
    ("most", "told"),
    [("4", "--prompt-adapters pirate: "), ("0", "--enable-prompt-adapter needs --max-prompt-adapter-token")],
)
def test_a_start_that_cannot_serve_an_adapter_fails(
    tiny_llama: Path, folder: Path, most: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Start in this process; that a server ends with what its engine refuses is in test_lora.py."""
    caplog.set_level("INFO")
    given = words(tiny_llama, folder, "--max-prompt-adapter-token", most)
    with pytest.raises(ConfigError) as error:
        LLM.from_config(parse(given).config, discover())
    assert told in str(error.value)
    assert exit_status(error.value) == 2
    assert "model loaded" not in caplog.text
