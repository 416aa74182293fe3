"""The packages that `ferrule plugins new` writes: built, installed as a stranger's, proved by their kits, and served.

All of them are in one temporary environment and in two servers: one has every plugin of a request's way, the other what
brings a model in.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from ferrule.plugin import KINDS, discover
from ferrule_plugins.command.plugins import PluginsCommand
from ferrule_testkit import server as servers
from ferrule_testkit.public import private_imports
from tools import ROOT
from tools.architecture import Module
from tools.architecture.shape import code_lines

TEMPLATES = ROOT / "templates" / "plugin"
MOST_LINES = 60
LONG = (
    *("random_work", "every_cut", "any_cut", "linear", "chunks", "frequencies", "penalties", "soft_caps", "long_rows"),
    *("a_change_of_any_weight", "no_route_of_another", "truncation", "seed_and_position"),
    *("scopes_are_kept_apart", "extreme_neighbours"),
)
MOST = pytest.param(f"not ({' or '.join(LONG)})", id="most")
ALL = pytest.param("", marks=pytest.mark.slow, id="all")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["-q", "--no-deps", "--no-index"]
# What `pip wheel` asks of each project's build backend, in a copy of one process: pip starts three for each.
BUILD = """
import os, sys
from setuptools.build_meta import build_wheel

for project in sys.argv[2:]:
    if os.fork() == 0:
        os.chdir(project)
        build_wheel(sys.argv[1])
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{project} cannot be built")
"""
ANSWER = '[[thoughts]]It asks.[[/thoughts]]Look: [[call]]{"name": "now", "arguments": {"zone": "UTC"}}[[/call]]'


@dataclass(frozen=True)
class Installed:
    """The installed packages. `sources` has a folder for each kind; `site` is what pip installed from their wheels."""

    sources: Path
    site: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(self, *argv: str) -> str:
        """Run another interpreter, elsewhere, that has the packages; return its standard output. It must succeed."""
        done = subprocess.run(
            [sys.executable, *argv],
            env={**os.environ, **self.environment},
            cwd=self.site.parent,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("strangers")
    sources, wheels, site = folder / "src", folder / "wheels", folder / "site"
    wheels.mkdir()
    plugins = discover()
    for kind in KINDS:
        assert PluginsCommand().run(["new", kind, f"demo-{kind}", "--dir", str(sources / f"demo_{kind}")], plugins) == 0
    projects = [str(sources / f"demo_{kind}") for kind in KINDS]
    subprocess.run([sys.executable, "-c", BUILD, str(wheels), *projects], check=True, stdout=subprocess.DEVNULL)
    built = [str(wheel) for wheel in wheels.glob("*.whl")]
    assert len(built) == len(KINDS)
    subprocess.run([*PIP, "install", *OFFLINE, "--no-compile", "--target", str(site), *built], check=True)
    return Installed(sources, site)


# ---------------------------------------------------------------------------------------- the packages


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_small_and_uses_public_names_only(kind: str) -> None:
    code = TEMPLATES / kind / "src" / "ferrule_example" / "__init__.py"
    lines = code_lines(Module(str(code), code.read_text()))
    assert 3 < lines <= MOST_LINES
    assert list(private_imports(TEMPLATES / kind / "src")) == []
    assert f'[project.entry-points."ferrule.v1.{kind}"]' in (TEMPLATES / kind / "pyproject.toml").read_text()


def test_every_kind_has_a_template_and_no_other() -> None:
    assert {folder.name for folder in TEMPLATES.iterdir() if folder.is_dir()} == set(KINDS)


@pytest.mark.parametrize("chosen", [MOST, ALL])
def test_each_passes_its_conformance_kit(installed: Installed, chosen: str) -> None:
    """Run one pytest for all, away from this repository; it imports the installed wheels.

    In `make test` without the promises that take longest (`LONG`), which built-in plugins of each kind keep there.
    """
    report = installed.site.parent / "report.xml"
    tests = [str(installed.sources / f"demo_{kind}" / "tests") for kind in KINDS]
    options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib"]
    options += ["-k", chosen, "--rootdir", str(installed.sources), "--junitxml", str(report)]
    installed.run("-m", "pytest", *options, *tests)
    passed = dict.fromkeys(KINDS, 0)
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            passed[case.attrib["classname"].partition(".")[0].removeprefix("demo_")] += 1
    assert min(passed.values()) >= 4, passed


def test_the_command_lists_them_all(installed: Installed) -> None:
    listed = json.loads(installed.run("-m", "ferrule", "plugins", "list", "--json"))
    found = {row["kind"]: row for row in listed["plugins"] if row["name"].startswith("demo-")}
    assert set(found) == set(KINDS)
    for kind, row in found.items():
        assert row["source"] == f"ferrule-demo-{kind.replace('_', '-')} 0.1.0"
        assert row["state"] == ("off" if kind == "hooks" else "available")
    assert not listed["problems"]


def test_a_command_of_a_package_runs(installed: Installed) -> None:
    said = installed.run("-m", "ferrule", "demo-command", "policy").splitlines()
    assert "demo-policy: ferrule-demo-policy 0.1.0" in said
    assert "demo-command" in installed.run("-m", "ferrule", "--help")


# ---------------------------------------------------------------------------------------- on a request's way


@pytest.fixture(scope="module")
def served(
    installed: Installed, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[servers.Server, httpx.Client]]:
    """Serve with every plugin between the body and the tokens at once; the cache holds one request of the greatest
    length.
    """
    chosen = {
        "--device": "platform",
        "--attention-backend": "attention",
        "--distributed-executor-backend": "executor",
        "--scheduler-cls": "scheduler",
        "--scheduling-policy": "policy",
        "--sampler": "sampler",
        "--logits-processor-pattern": "logits_processor",
        "--tool-call-parser": "tool_parser",
        "--reasoning-parser": "reasoning_parser",
        "--response-store": "response_store",
        "--adapter-bank": "adapter_bank",
    }
    args = [str(tiny_llama), "--served-model-name", "tiny", "--num-gpu-blocks-override", "17"]
    args += [word for flag, kind in chosen.items() for word in (flag, f"demo-{kind}")]
    args += ["--speculative-config", '{"method": "demo-speculator", "adaptive": false}']
    args += ["--enable-auto-tool-choice", "--routers", "openai", "responses", "tokenize", "health", "demo-router"]
    adapter = tmp_path_factory.mktemp("adapter")
    save_file({"model.layers.0.self_attn.o_proj": torch.full((64,), -3.0)}, adapter / "vectors.safetensors")
    args += ["--enable-lora", "--lora-modules", f"rescaled={adapter}"]
    args += ["--plugins-allow", *(f"{kind}:demo-{kind}" for kind in KINDS)]
    log = tmp_path_factory.mktemp("served") / "log"
    with (
        servers.running(args, log, installed.environment) as running,
        httpx.Client(base_url=running.url, timeout=240) as client,
    ):
        yield running, client


def completed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"model": "tiny", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def figure(client: httpx.Client, name: str) -> float:
    """Sum of a metric's series."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line))


def test_short_prompts_pass_long_ones_and_one_runs_at_a_time(served: tuple[servers.Server, httpx.Client]) -> None:
    """Use `policy` and `scheduler`: the cache holds one request of the greatest length, so one runs, though more
    fit.
    """
    server, client = served
    engine, taken = server.children()["engine"], server.taken()
    prompts = ["the " * words for words in (1, 60, 9)]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 60, "ignore_eos": True, "stream": True}
    os.kill(engine, signal.SIGSTOP)  # until all three are on their way to it
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert servers.until(lambda: server.taken() == taken + 3)
        os.kill(engine, signal.SIGCONT)
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    told = [choice["index"] for event in events for choice in event["choices"]]
    assert [index for index, _ in groupby(told)] == [0, 2, 1]
    assert figure(client, "vllm:num_preemptions_total") == 0.0


def test_one_token_is_not_repeated_for_ever(served: tuple[servers.Server, httpx.Client]) -> None:
    """Use `sampler`."""
    _, client = served
    options = {"logit_bias": {"70": 100}, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    tokens = completed(client, prompt="hello", return_tokens_as_token_ids=True, **options)["logprobs"]["tokens"]
    runs = [len(run[0]) for run in re.finditer("1+", "".join(str(int(token == "token_id:70")) for token in tokens))]
    assert len(tokens) == 30
    assert runs == [8, 8, 8, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_begun_and_parsed(served: tuple[servers.Server, httpx.Client], stream: bool) -> None:
    """Let `logits_processor` make the model say what `reasoning_parser` and `tool_parser` read."""
    _, client = served
    ids = client.post("/tokenize", json={"prompt": ANSWER, "add_special_tokens": False}).json()["tokens"]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "now"}],
        "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
        "max_tokens": len(ids),
        "stream": stream,
        "ignore_eos": True,
        "logits_processors": [{"qualname": "demo-logits_processor", "kwargs": {"ids": ids}}],
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    else:
        deltas = [response.json()["choices"][0]["message"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "It asks."
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Look:"
    assert "".join(call.get("name") or "" for call in calls) == "now"
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) == {"zone": "UTC"}
    body["logits_processors"][0]["kwargs"] = {"ids": []}  # type: ignore[index]
    refused = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, "1 to 4096 entries" in refused.text) == (400, True)


def test_a_route_of_a_package_answers(served: tuple[servers.Server, httpx.Client]) -> None:
    """Use `router`."""
    _, client = served
    wanted = completed(client, prompt="The quick", max_tokens=5)["text"]
    assert client.post("/demo-router", json={"text": "The quick", "tokens": 5}).json() == {"text": wanted}
    lines = client.post("/demo-router", json={"text": "The quick", "tokens": 5, "stream": True}).text.splitlines()
    assert "".join(json.loads(line)["text"] for line in lines) == wanted
    for answer in (client.post("/demo-router", json={"text": ""}), client.get("/demo-router/nothing")):
        assert set(answer.json()) == {"error"}
        assert isinstance(answer.json()["error"], str)


def test_responses_are_kept_by_a_package(served: tuple[servers.Server, httpx.Client]) -> None:
    """Use `response_store`."""
    _, client = served
    made = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 3}).json()
    assert client.get(f"/v1/responses/{made['id']}").json() == made
    asked = {"input": "more", "max_output_tokens": 3, "previous_response_id": made["id"], "background": True}
    stream = client.post("/v1/responses", json=asked | {"stream": True}).text
    name = re.search(r'"id":"(resp_[^"]*)"', stream)
    assert name is not None
    assert client.get(f"/v1/responses/{name[1]}?stream=true").text == stream
    assert client.delete(f"/v1/responses/{made['id']}").json()["deleted"] is True
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_an_adapter_is_what_a_package_makes_of_it(served: tuple[servers.Server, httpx.Client]) -> None:
    """Use `adapter_bank`."""
    _, client = served
    plain, rescaled = (
        client.post("/v1/completions", json={"model": name, "prompt": "The quick", "temperature": 0, "max_tokens": 8})
        for name in ("tiny", "rescaled")
    )
    assert (plain.status_code, rescaled.status_code) == (200, 200), rescaled.text
    assert plain.json()["choices"][0]["text"] != rescaled.json()["choices"][0]["text"]


def test_figures_of_packages_are_shown(served: tuple[servers.Server, httpx.Client]) -> None:
    """Show the figures of `stat_logger` and `hooks`, beside the server's own."""
    _, client = served
    before = figure(client, "ferrule_answer_tokens_total")
    completed(client, prompt="hello", max_tokens=6, ignore_eos=True)
    assert figure(client, "ferrule_answer_tokens_total") == before + 6
    assert "ferrule_longest_gap_seconds" in client.get("/metrics").text
    assert figure(client, "ferrule_longest_wait_seconds") > 0


def test_the_engines_side_is_that_of_packages(served: tuple[servers.Server, httpx.Client]) -> None:
    """Find `platform`, `attention`, `executor` and `hooks` in the log. This is the last test: it stops the server."""
    server, client = served
    assert completed(client, prompt="hello", max_tokens=2)["text"]
    assert server.stop() == 0
    log = server.text()
    for part in (
        "attention=demo-attention",
        "dtype=float32",
        "steps were run",
        "answers are counted by how they ended",
    ):
        assert part in log, part


# ---------------------------------------------------------------------------------------- what brings a model in


@pytest.fixture(scope="module")
def gated(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint of the `model` package's kit, with weights for `load_format` and without a
    tokenizer.json.
    """
    folder = tmp_path_factory.mktemp("checkpoints") / "gated"
    folder.mkdir()
    script = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from ferrule_demo_load_format import save
from ferrule_demo_model.conformance import write
from ferrule_demo_tokenizer.conformance import write as write_tokenizer
folder = Path(sys.argv[1])
write(folder)
save(folder, load_file(folder / "model.safetensors"))
write_tokenizer(folder)
for name in ("model.safetensors", "tokenizer.json"):
    (folder / name).unlink()
"""
    installed.run("-c", script, str(folder))
    return folder


def test_a_model_its_weights_and_its_tokenizer_are_of_packages(
    installed: Installed, gated: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """Use `hub`, `model`, `load_format`, `quantization`, `tokenizer`: weights of the plain Llama but for the gates."""
    args = [
        f"shelf://{gated.parent}",
        "--hub",
        "demo-hub",
        "--revision",
        gated.name,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--served-model-name",
        "tiny",
    ]
    args += ["--load-format", "demo-load_format", "--tokenizer-mode", "demo-tokenizer"]
    args += ["--quantization", "demo-quantization"]
    args += ["--num-gpu-blocks-override", "64"]
    with (
        servers.running(args, tmp_path / "log", installed.environment) as running,
        httpx.Client(base_url=running.url, timeout=240) as client,
    ):
        tokens = client.post("/tokenize", json={"prompt": "é!<|end|>"}).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": [195, 169, 33]}).json()["prompt"]
        answer = completed(client, prompt="hello", max_tokens=20)
    assert (tokens, text) == ([195, 169, 33, 256], "é!")
    assert answer["finish_reason"] in {"length", "stop"}
    log = (tmp_path / "log").read_text()
    assert "architecture=demo-model" in log
    assert "quantization=demo-quantization" in log
