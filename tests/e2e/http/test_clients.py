"""Clients that people use, in the versions of clients/requirements.txt, against the real server.

They live in an environment of their own, which is made once and kept in the cache folder of the user; it takes a
package index. The page docs/clients.md is the test: its blocks are run, and what they print is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ferrule_testkit import server as servers
from tools import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent / "clients"
PAGE = ROOT / "docs" / "clients.md"
BASE = "http://127.0.0.1:8000"
SERVE = ("--dtype", "float32", "--api-key", "EMPTY", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Block(NamedTuple):
    heading: str
    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    """Return the fenced blocks of the page, each under its heading."""
    found, heading = [], ""
    pattern = re.compile(r'^## ([^\n]+)$|^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    for match in pattern.finditer(PAGE.read_text(encoding="utf-8")):
        heading = match[1] or heading
        if match[2]:
            found.append(Block(heading, match[2], match[3] or "", match[4]))
    return found


def programs() -> list[tuple[str, str, str]]:
    """Return (name, program, what it prints) of the Python blocks."""
    every = blocks()
    return [
        (f"{block.heading}-{place}", block.text, after.text)
        for place, (block, after) in enumerate(zip(every, every[1:], strict=False))
        if block.language == "python"
    ]


@pytest.fixture(scope="session")
def clients() -> Path:
    """Return the `bin` folder of an environment with the clients."""
    return environment("requirements.txt")


@pytest.fixture(scope="session")
def agents() -> Path:
    """Return the `bin` folder of an environment with OpenAI's Agents SDK."""
    return environment("agents.txt")


def environment(requirements: str) -> Path:
    """Return the `bin` folder of an environment with these requirements, which is made where it is not there."""
    wanted = (HERE / requirements).read_bytes()
    key = hashlib.sha256(wanted + sys.version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ferrule"
    home = cache / f"clients-{key}"
    whole = home / "whole"
    if not whole.exists():  # it was never made, or not to its end
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        installed = subprocess.run(
            [*pip, "-r", HERE / requirements], capture_output=True, text=True, timeout=1000, check=False
        )
        if installed.returncode:
            pytest.fail(f"the clients cannot be installed:\n{installed.stderr[-2000:]}")
        whole.touch()
    return home / "bin"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    folder = tmp_path_factory.mktemp("server")
    stored = ("--plugin-config.router:batches.folder", str(folder / "store"))
    with servers.running([*SERVE, *stored], folder / "log", ONE_THREAD) as found:
        yield found


def run(*command: Any, folder: Path, clients: Path, timeout: float = 500) -> str:
    """Run a command that must end well, in the clients' environment, without a hub; return its standard output."""
    environment = {
        "PATH": f"{clients}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def script(name: str, url: str, clients: Path, folder: Path, *more: str) -> str:
    return run(clients / "python", HERE / name, f"{url}/v1", *more, folder=folder, clients=clients)


@pytest.mark.parametrize(("program", "printed"), [pytest.param(p, out, id=name) for name, p, out in programs()])
def test_the_page_prints_what_it_says(
    program: str, printed: str, server: servers.Server, clients: Path, tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(program.replace(BASE, server.url), encoding="utf-8")
    assert run(clients / "python", path, folder=tmp_path, clients=clients) == printed


def test_every_client_has_a_program() -> None:
    names = {name.rpartition("-")[0] for name, _, _ in programs()}
    assert names == {"openai", "openai-responses", "anthropic", "ollama", "litellm", "langchain-openai"}
    assert len(programs()) >= 5


def test_curl(server: servers.Server, clients: Path, tmp_path: Path) -> None:
    [commands] = [block.text for block in blocks() if block.heading == "curl"]
    out = run("bash", "-e", "-c", commands.replace(BASE, server.url), folder=tmp_path, clients=clients)
    assert '"id":"ferrule-tiny"' in out
    assert "The capital of France is Paris." in out
    assert "data: [DONE]" in out
    assert '"tokens":[' in out


def test_errors_are_the_clients_own(server: servers.Server, clients: Path, tmp_path: Path) -> None:
    out = script("openai_errors.py", server.url, clients, tmp_path)
    assert out.splitlines() == ["404 400 400 400 404 404 401", "200 application/json", "[0, 1, 2, 3]"]


def test_the_agents_sdk(server: servers.Server, agents: Path, tmp_path: Path) -> None:
    """Call a function over Responses, send its result back, and read the answer, whole and streamed."""
    assert script("agents_loop.py", server.url, agents, tmp_path).splitlines() == [
        "whole ['tool_call_item', 'tool_call_output_item'] message_output_item 1",
        "streamed True True 2",
    ]


def test_a_full_queue_is_waited_for_by_the_client(clients: Path, tmp_path: Path) -> None:
    gate = servers.Gate(tmp_path)
    queue = ("--max-waiting-requests", "1", "--max-num-seqs", "1", *gate.args)
    with servers.running([*SERVE, *queue], tmp_path / "log", ONE_THREAD) as server, ThreadPoolExecutor() as pool:
        with gate.shut():
            hurried = pool.submit(script, "openai_retries.py", server.url, clients, tmp_path, "0")
            assert servers.until(lambda: server.text().count('" 429 ') == 11)
        assert hurried.result() == "1\n"
        assert script("openai_retries.py", server.url, clients, tmp_path, "40") == "12\n"


def test_a_server_that_starts_is_waited_for_by_the_client(clients: Path, tmp_path: Path) -> None:
    with servers.started(SERVE, tmp_path / "log", ONE_THREAD) as server:
        assert script("openai_starting.py", server.url, clients, tmp_path) == "The capital of France is Paris.\n"


@pytest.fixture(scope="module")
def evaluated(
    server: servers.Server, clients: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the figures and the samples of each task, by the commands of the page."""
    from ferrule_contrib import tiny

    folder = tmp_path_factory.mktemp("lm-eval")
    mine = [block for block in blocks() if block.heading == "lm-eval"]
    for block in mine:
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    for block in mine:
        if block.language == "bash" and "lm_eval" in block.text:
            text = block.text.replace(BASE, server.url).replace("path/to/the/model", str(tiny.path()))
            run("bash", "-e", "-c", text, folder=folder, clients=clients, timeout=500)
    found = {}
    for task in ("capitals", "sums"):
        [figures] = folder.glob(f"**/{task}_2*.json")
        [samples] = folder.glob(f"**/samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        found[task] = json.loads(figures.read_text(encoding="utf-8"))["results"][task], rows
    return found


def test_what_the_model_knows_scores(evaluated: dict[str, Any]) -> None:
    assert evaluated["capitals"][0]["acc,none"] == 1.0
    assert evaluated["sums"][0]["exact_match,last-number"] >= 2 / 3


def test_loglikelihoods_are_those_of_the_model(evaluated: dict[str, Any]) -> None:
    """Compare with `LLM`, without HTTP, also for the wrong continuations, which are not likely."""
    from ferrule import LLM, SamplingParams
    from ferrule_contrib import tiny

    asked = []
    for sample in evaluated["capitals"][1]:
        for place, (said,) in enumerate(sample["resps"]):
            words = sample["arguments"][f"gen_args_{place}"]
            asked.append((words["arg_0"], words["arg_1"], said))
    assert len(asked) == 8
    with LLM(str(tiny.path()), dtype="float32", max_model_len=512) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        for context, continuation, (value, greedy) in asked:
            cut = len(tokenizer.encode(context, add_special_tokens=False))
            ids = list(tokenizer.encode(context + continuation, add_special_tokens=False))
            [output] = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
            positions = output.prompt_logprobs
            assert positions is not None
            chosen = [(positions[place] or {})[ids[place]] for place in range(cut, len(ids))]
            assert float(value) == pytest.approx(sum(one.logprob for one in chosen), abs=1e-3)
            assert (str(greedy) == "True") == all(one.rank == 1 for one in chosen)
