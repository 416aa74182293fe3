"""An adapter that adds tokens, through a whole server: its own tokenizer, and requests that name its tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ferrule.errors import ConfigError
from ferrule.llm.offline import LLM
from ferrule.sampling_params import SamplingParams
from ferrule.types import Adapter
from ferrule_testkit import server as servers
from tests.fakes.added_tokens import add_tokens, full_checkpoint, make_adapter
from tests.fakes.lora_files import write_adapter
from tests.fakes.serving import Here, serving_here

NAMES = ("<sql>", "<end>", "<mark>")
LENGTH = 256  # of the tiny checkpoint
PROMPT = "<sql>The quick brown fox<mark> jumps over"


@dataclass(frozen=True)
class World:
    """A checkpoint, an adapter with `NAMES` from the id `size` on, and what the merged model says greedily."""

    base: Path
    adapter: Adapter
    size: int
    ids: list[int]
    prompt_ids: list[int]

    @property
    def added(self) -> list[int]:
        return [self.size + number for number in range(len(NAMES))]


@pytest.fixture(scope="module")
def world(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    size = json.loads((tiny_llama / "config.json").read_text())["vocab_size"]
    root = tmp_path_factory.mktemp("adapters")
    base, folder = full_checkpoint(tiny_llama, root / "base"), root / "sql"
    adapter = make_adapter(base, folder, len(NAMES), target_modules=["q_proj", "v_proj"])
    tokens = {name: size + number for number, name in enumerate(NAMES)}
    add_tokens(base, folder, tokens)
    add_tokens(base, folder / "merged", tokens)
    with LLM(str(folder / "merged"), dtype="float32", num_gpu_blocks_override=64) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), use_tqdm=False)
        ids, prompt_ids = list(output.outputs[0].token_ids), list(output.prompt_token_ids)
    assert {size, size + 2} <= set(prompt_ids)
    return World(base, adapter, size, ids, prompt_ids)


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    root = tmp_path_factory.mktemp("server")
    write_adapter(world.base, root / "plain", 1)
    args = [str(world.base), "--served-model-name", "tiny", "--dtype", "float32", "--num-gpu-blocks-override", "256"]
    args += ["--enable-lora", "--max-loras", "2", "--lora-extra-vocab-size", "4", "--max-logprobs", "8"]
    write_adapter(world.base, root / "long", 2, context_length=2 * LENGTH)
    args += ["--long-lora-scaling-factors", "2", "--max-cpu-loras", "4"]
    args += ["--lora-modules", f"sql={world.adapter.path}", *(f"{name}={root / name}" for name in ("plain", "long"))]
    with serving_here(args) as running:
        yield running


def post(server: Here, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def complete(server: Here, **body: Any) -> dict[str, Any]:
    answer = post(server, "/v1/completions", **{"model": "sql", "prompt": PROMPT, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_text_goes_through_the_adapters_tokenizer(server: Here, world: World) -> None:
    read = post(server, "/tokenize", model="sql", prompt=PROMPT, return_token_strs=True).json()
    assert read["tokens"] == world.prompt_ids
    assert {"<sql>", "<mark>"} <= set(read["token_strs"])
    assert post(server, "/detokenize", model="sql", tokens=world.added).json()["prompt"] == "".join(NAMES)
    for name in ("tiny", "plain"):
        plain = post(server, "/tokenize", model=name, prompt=PROMPT).json()
        assert max(plain["tokens"]) < world.size
        refused = post(server, "/detokenize", model=name, tokens=world.added)
        assert refused.status_code == 400
        assert f"not in [0, {world.size})" in refused.text


def test_answers_are_those_of_the_merged_model(server: Here, world: World) -> None:
    found = complete(server, max_tokens=12, ignore_eos=True, return_token_ids=True, logprobs=2)
    assert found["token_ids"] == world.ids
    assert any(id >= world.size for id in world.ids)
    named = {NAMES[id - world.size] for id in world.ids if id >= world.size}
    assert named <= set(found["logprobs"]["tokens"])
    assert "".join(found["logprobs"]["tokens"]).strip() == found["text"].strip()
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == found["text"]


def test_sampling_parameters_name_added_tokens(server: Here, world: World) -> None:
    _, end, mark = world.added
    forced = complete(server, max_tokens=3, logit_bias={str(mark): 100}, logprobs=1, prompt="The")
    assert forced["text"] == "<mark>" * 3
    allowed = complete(server, max_tokens=2, allowed_token_ids=[end], ignore_eos=True, prompt="The")
    assert allowed["text"] == "<end><end>"
    stopped = complete(server, max_tokens=5, logit_bias={str(end): 100}, stop_token_ids=[end], prompt="The")
    assert (stopped["stop_reason"], stopped["finish_reason"]) == (end, "stop")
    string = complete(server, max_tokens=5, logit_bias={str(mark): 100}, stop="<mark><mark>", prompt="The")
    assert (string["text"], string["stop_reason"]) == ("", "<mark><mark>")
    penalised = complete(server, max_tokens=8, logit_bias={str(mark): 8}, frequency_penalty=2, prompt="The")
    assert penalised["text"].count("<mark>") < 8
    banned = complete(server, max_tokens=4, logit_bias={str(mark): 100}, bad_words=["<mark>"], prompt="The")
    assert "<mark>" not in banned["text"]
    echoed = complete(server, max_tokens=1, echo=True, logprobs=1)
    assert echoed["text"].startswith(PROMPT) or "<sql>" in echoed["text"]
    assert "<sql>" in echoed["logprobs"]["tokens"]
    beams = complete(server, max_tokens=4, use_beam_search=True, best_of=2, ignore_eos=True)
    assert beams["text"]
    several = post(server, "/v1/completions", model="sql", prompt="The", n=3, seed=1, max_tokens=8).json()
    assert len(several["choices"]) == 3


def test_constraints_keep_to_the_models_tokens(server: Here, world: World) -> None:
    _, _, mark = world.added
    found = complete(server, max_tokens=4, logit_bias={str(mark): 100}, guided_regex="[a-z]{1,3}", prompt="The")
    assert found["text"].isalpha()
    choice = complete(server, max_tokens=8, guided_choice=["yes", "no"], logit_bias={str(mark): 100}, prompt="The")
    assert choice["text"] in ("yes", "no")


@pytest.mark.parametrize("name", ["tiny", "plain"])
def test_other_rows_have_none_of_it(server: Here, world: World, name: str) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": [5, world.size]}),
        ("logit_bias", {"logit_bias": {str(world.size): 1}}),
        ("stop_token_ids", {"stop_token_ids": [world.size]}),
        ("allowed_token_ids", {"allowed_token_ids": [world.size]}),
    ]
    for field, body in refused:
        answer = post(server, "/v1/completions", **{"model": name, "prompt": "The", "max_tokens": 1} | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    beyond = post(server, "/v1/completions", model="sql", prompt=[5, world.size + len(NAMES)], max_tokens=1)
    assert beyond.status_code == 400
    hot = {"model": name, "prompt": "The", "max_tokens": 40, "temperature": 2, "n": 8, "seed": 1, "ignore_eos": True}
    for choice in post(server, "/v1/completions", **hot, return_token_ids=True).json()["choices"]:
        assert max(choice["token_ids"]) < world.size


def test_conversations_are_in_the_models_template(server: Here, world: World) -> None:
    messages = [{"role": "user", "content": "Say <mark>"}]
    read = post(server, "/tokenize", model="sql", messages=messages).json()["tokens"]
    assert read.count(world.size + 2) == 1
    body = {"model": "sql", "messages": messages, "max_tokens": 3, "logit_bias": {str(world.size + 2): 100}}
    answer = post(server, "/v1/chat/completions", **body, logprobs=True, top_logprobs=1)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "<mark>" * 3
    assert [(one["token"], bytes(one["bytes"])) for one in choice["logprobs"]["content"]] == [("<mark>", b"<mark>")] * 3


def test_each_adapter_has_its_longest_text(server: Here) -> None:
    listed = {model["id"]: model for model in httpx.get(f"{server.url}/v1/models").json()["data"]}
    longest = {name: model["max_model_len"] for name, model in listed.items()}
    assert longest == {"tiny": LENGTH, "sql": LENGTH, "plain": LENGTH, "long": 2 * LENGTH}
    assert post(server, "/tokenize", model="long", prompt="a").json()["max_model_len"] == 2 * LENGTH
    assert post(server, "/tokenize", prompt="a").json()["max_model_len"] == LENGTH
    for name, most in longest.items():
        body = {"model": name, "temperature": 0, "prompt": [5] * (most - 4)}
        answer = post(server, "/v1/completions", **body, max_tokens=4, ignore_eos=True)
        assert answer.json()["usage"]["total_tokens"] == most, answer.text
        refused = post(server, "/v1/completions", **body, max_tokens=5)
        assert refused.status_code == 400
        assert f"context of {most} tokens" in refused.text
    for name in ("tiny", "long"):  # without max_tokens an answer fills what the context has left
        said = {"role": "user", "content": "a " * (longest[name] - 40)}
        body = {"model": name, "messages": [said], "temperature": 0, "ignore_eos": True}
        usage = post(server, "/v1/chat/completions", **body).json()["usage"]
        assert usage["total_tokens"] == longest[name]
        assert 1 < usage["completion_tokens"] < 40


def test_adapters_that_cannot_be_served_stop_the_start(world: World, tmp_path: Path) -> None:
    """Have the tokenizer of one refused by a server, and the length of the other's texts by an engine."""
    folder = Path(shutil.copytree(world.adapter.path, tmp_path / "other", ignore=shutil.ignore_patterns("merged")))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-4]["content"] = "<another>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    args = [str(world.base), "--dtype", "float32", "--num-gpu-blocks-override", "64", "--enable-lora"]
    args += ["--lora-modules", f"other={folder}"]
    with servers.started(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        assert server.process.wait(120) in (1, 2)
    said = "--lora-modules: The adapter 'other' adds 3 tokens, and its tokenizer cannot be used"
    assert said in (tmp_path / "log").read_text()
    long = write_adapter(world.base, tmp_path / "long", 3, context_length=3 * LENGTH)
    said = "--lora-modules: long: .* context_length of 768 tokens, 3 times the model's 256"
    with pytest.raises(ConfigError, match=said):
        LLM(
            str(world.base),
            dtype="float32",
            num_gpu_blocks_override=64,
            enable_lora=True,
            lora_modules=[f"long={long}"],
        )
