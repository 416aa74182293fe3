"""The served OpenAPI document holds: schemathesis makes requests from it, and each answer is one that it describes.

No status of 500 or above, no status, media type or body that the document does not tell, no call without a key let in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ferrule_testkit import server as servers

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)
FLAGS = (
    *("--max-model-len", "256", "--num-gpu-blocks-override", "256", "--served-model-name", "tiny"),
    *("--api-key", "key", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--trust-request-chat-template", "--enable-prompt-embeds", "--enable-prompt-tokens-details"),
)

# Made from the schema alone, a body with dozens of fields is refused for one of them. These keep a few fields of each,
# over a prompt that the model takes, so that the handlers are reached and answers of all forms come back.
HOOKS = """
import json
import random
import zlib

import schemathesis

TALK = [{"role": "user", "content": "hello"}]
PROMPTS = ["hello", ["a", "b"], [40, 41], [[40], [41, 42]]]


@schemathesis.hook
def map_body(context, body):
    if not isinstance(body, dict):
        return body
    draw = random.Random(zlib.crc32(json.dumps(body, sort_keys=True, default=str).encode()))
    kept = dict(draw.sample(sorted(body.items(), key=lambda item: item[0]), min(len(body), draw.randrange(5))))
    kept.pop("model", None)
    if context.operation.path == "/detokenize":
        return {"tokens": [token % 300 for token in body["tokens"] if isinstance(token, int)]}
    if context.operation.path == "/v1/chat/completions":
        return {**kept, "messages": TALK, "max_tokens": 2, "stream": draw.random() < 0.4}
    if context.operation.path == "/v1/completions":
        return {**kept, "prompt": draw.choice(PROMPTS), "max_tokens": 2, "stream": draw.random() < 0.4}
    if context.operation.path == "/tokenize":
        return {**kept, **({"messages": TALK, "prompt": None} if draw.random() < 0.5 else {"prompt": "a"})}
    return body
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Run the embedded model with most features on, administration included."""
    env = {"OMP_NUM_THREADS": "1", "FERRULE_SERVER_DEV_MODE": "1"}
    with servers.running(FLAGS, tmp_path_factory.mktemp("server") / "log", env) as running:
        yield running


LEFT_OUT = "profile|sleep|wake"  # what changes the server
TWICE = f"{LEFT_OUT}|invocations|api/[^c]"  # whose bodies are those of completions and chats, or like /api/chat's


def run(
    server: servers.Server,
    folder: Path,
    examples: int,
    deep: bool = False,
    borders: bool = True,
    left_out: str = TWICE,
) -> int:
    """Return the number of cases, all of which must pass. `examples` are made for each operation, besides those at
    `borders`.

    `deep`: with the hooks, and then without borders and without bodies that the schema forbids. `left_out` matches the
    paths that are not called.
    """
    document = httpx.get(f"{server.url}/openapi.json", headers={"authorization": "Bearer key"}, timeout=240)
    assert document.status_code == 200  # from now on at once: the command waits for it for ten seconds
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    options = ["--max-examples", str(examples), "--checks", ",".join(CHECKS[:-3] if deep else CHECKS)]
    options += (
        ["--phases", "fuzzing", "--mode", "positive"]
        if deep
        else ["--phases", "coverage,fuzzing" if borders else "fuzzing"]
    )
    options += ["--seed", "1", "--continue-on-failure", "--suppress-health-check", "all", "--request-timeout", "240"]
    options += ["--header", "Authorization: Bearer key", "--exclude-path-regex", left_out]
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder)}
    if deep:
        (folder / "body_hooks.py").write_text(HOOKS, encoding="utf-8")
        env |= {"SCHEMATHESIS_HOOKS": "body_hooks", "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run([*command, *options], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert found[1] == found[2], done.stdout[-8000:]
    assert server.health() == 200
    return int(found[2])


def answered(server: servers.Server, path: str) -> int:
    """Return how often a route has answered with 200, by the log."""
    return len(re.findall(rf'"POST {path} HTTP/1.1" 200', server.text()))


def test_the_document_holds_for_a_few_requests_of_each_route(server: servers.Server, tmp_path: Path) -> None:
    assert run(server, tmp_path, 6, borders=False) >= 60


@pytest.mark.slow  # three thousand requests; test_hostile.py tries the borders of fields
def test_the_document_holds_at_its_borders(server: servers.Server, tmp_path: Path) -> None:
    assert run(server, tmp_path, 3) >= 120


@pytest.mark.slow  # the same promise with eight times as many requests
def test_the_document_holds_in_depth(server: servers.Server, tmp_path: Path) -> None:
    """Get each form of answer, which fits its schema."""
    assert run(server, tmp_path, 40, deep=True) >= 150
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert servers.until(lambda path=path: answered(server, path) >= 15), path


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_document_holds(server: servers.Server, tmp_path: Path) -> None:
    shallow = run(server, tmp_path, 300, left_out=LEFT_OUT)
    deep = run(server, tmp_path, 150, deep=True, left_out=LEFT_OUT)
    assert (shallow >= 1000, deep >= 500) == (True, True), (shallow, deep)
