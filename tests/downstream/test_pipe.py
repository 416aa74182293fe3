"""An executor of a stranger that runs Ferrule's worker in a child process: same tokens, same errors.

What is asked of every executor, a lost worker and the end included, is in `test_packages`.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ferrule.errors import CheckpointError, RequestError, StartupError
from ferrule.types import CompiledGrammar
from ferrule_contrib import tiny
from ferrule_testkit import server as servers
from ferrule_testkit.harness import Harness, Output

TEXTS = ("Once", "What is the capital of France?", "The sun is a star, and the moon is", "One, two, three, four,")
PROMPTS = [Tokenizer.from_file(str(tiny.path() / "tokenizer.json")).encode(text).ids for text in TEXTS]
TOKENS = 12


@pytest.fixture(scope="module")
def built_in() -> list[Output]:
    with Harness(tiny.path(), dtype="float32") as harness:
        return harness.engine().run(PROMPTS, max_tokens=TOKENS)


def test_it_computes_what_the_built_in_executor_does(built_in: list[Output], on_path: Callable[[str], None]) -> None:
    on_path("acme_pipe")
    with Harness(tiny.path(), executor="acme_pipe", dtype="float32") as harness:
        assert harness.engine().run(PROMPTS, max_tokens=TOKENS) == built_in
        crowded = harness.engine(depth=2, max_num_batched_tokens=11, policy="chaos").run(PROMPTS, max_tokens=TOKENS)
        assert [output.token_ids for output in crowded] == [output.token_ids for output in built_in]
        unknown = CompiledGrammar(backend="guidance", digest=b"x", data=b"this is not a constraint")
        with pytest.raises(ValueError, match="Expected"):
            harness.executor.prepare(unknown).result()
        with pytest.raises(RequestError, match="does not cross"):
            harness.executor.call("collective_rpc", (print, (), {}))
        with pytest.raises(ValueError, match="no_such"):
            harness.executor.call("no_such")


def test_a_start_fails_as_it_does_here(tmp_path: Path, on_path: Callable[[str], None]) -> None:
    on_path("acme_pipe")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysModel"]}))
    said = []
    for executor in ("uni", "acme_pipe"):
        with pytest.raises(StartupError) as caught:
            Harness(tmp_path, executor=executor)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]
    assert said[0][0] is CheckpointError


@pytest.mark.slow  # e2e/plugins/test_templates.py serves with an executor of a package
def test_it_serves(built_in: list[Output], installed: Any, tmp_path: Path) -> None:
    args = [str(tiny.path()), "--dtype", "float32", "--served-model-name", "tiny"]
    args += ["--distributed-executor-backend", "acme_pipe"]
    with servers.running(args, tmp_path / "log", installed.environment("acme_pipe")) as server:

        def ask(**fields: Any) -> dict[str, Any]:
            body = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "return_token_ids": True, **fields}
            headers = {"content-type": "application/json"}
            asked = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked, timeout=240) as response:
                (choice,) = json.load(response)["choices"]
            return choice

        for prompt, wanted in zip(PROMPTS, built_in, strict=True):
            assert ask(prompt=prompt, ignore_eos=True)["token_ids"] == wanted.token_ids
        answer = ask(prompt="The year is", guided_regex="[0-9]{4}")["text"]
        assert re.fullmatch("[0-9]{4}", answer)
        assert server.says("[acme-worker worker] model loaded")
