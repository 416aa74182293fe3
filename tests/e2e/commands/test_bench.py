"""`ferrule bench`: each benchmark runs on real parts, and its figures add up."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferrule.launch.cli import main
from ferrule_plugins.command.bench import limits
from ferrule_testkit import server as servers
from tools.benchmarks.frontier import measure
from tools.benchmarks.timed import Client

Here = Callable[..., tuple[int, str, str]]
Figures = Callable[..., dict[str, Any]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run the command in this process without measuring the machine, which takes four seconds. Returns status, two
    outputs.
    """
    monkeypatch.setattr(limits, "measure", limits.Limits)
    monkeypatch.setenv("FERRULE_CPU_KVCACHE_SPACE", "0.1")

    def run(*args: str) -> tuple[int, str, str]:
        status = main(["bench", *args])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def figures_of(here: Here, tmp_path: Path) -> Figures:
    """Return the figures that a successful run writes into --output-json."""

    def run(benchmark: str, *args: str) -> dict[str, Any]:
        status, said, err = here(benchmark, "--output-json", str(tmp_path / "out.json"), *args)
        assert status == 0, said + err
        return dict(json.loads((tmp_path / "out.json").read_text()))

    return run


def test_serve(server: servers.Server, tmp_path: Path) -> None:
    """Run the benchmark as a command, which measures the machine first."""
    out = tmp_path / "serve.json"
    command = [sys.executable, "-m", "ferrule", "bench", "serve", "--port", str(server.port), "--output-json", str(out)]
    command += [
        "--num-prompts",
        "12",
        "--max-concurrency",
        "4",
        "--random-input-len",
        "48",
        "--random-prefix-len",
        "32",
    ]
    command += ["--random-output-len", "6", "--max-token-id", "300"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["failed"], figures["model"]) == (12, 0, "tiny")
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (12 * (32 + 48), 12 * 6)
    assert 0 < figures["p50_ttft_ms"] <= figures["p99_ttft_ms"] <= figures["p99_e2el_ms"]


def test_serve_as_scripts_for_the_documented_one_call_it(server: servers.Server, here: Here, tmp_path: Path) -> None:
    flags = f"""--backend openai-chat --base-url {server.url} --endpoint /v1/chat/completions --dataset-name random
        --random-input-len 12 --random-output-len 4 --random-range-ratio 0.5 --num-prompts 6 --request-rate inf
        --max-concurrency 3 --burstiness 0.5 --seed 3 --ignore-eos --temperature 0.5 --max-token-id 300
        --metadata a=b c=d
        --percentile-metrics ttft,tpot --metric-percentiles 25,99.5 --trust-remote-code --disable-tqdm
        --header X-Request-Id=load --extra-body.top_k 5 --save-result --result-dir {tmp_path / "results"}"""
    status, out, err = here("serve", *flags.split(), "--result-filename", "mine.json")
    assert status == 0, out + err
    assert "--disable-tqdm is accepted without effect" in err
    figures = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert (figures["completed"], figures["request_rate"], figures["max_concurrency"]) == (6, "inf", 3)
    assert (figures["a"], figures["c"], figures["backend"]) == ("b", "d", "openai-chat")
    assert 6 * 2 <= figures["total_output_tokens"] <= 6 * 6
    assert {"p25_ttft_ms", "p99.5_tpot_ms", "median_ttft_ms"} <= set(figures)
    assert not any("itl" in name for name in figures)


def test_serve_with_conversations_and_goodput(server: servers.Server, figures_of: Figures, tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    turns = [
        ("a b c d e f g h", "one two three four five six"),
        ("short", "x"),
        ("alone",),
        ("long " * 2000, "y " * 20),
    ]
    speakers = ("human", "gpt")
    talks = [[{"from": who, "value": text} for who, text in zip(speakers, talk, strict=False)] for talk in turns]
    file.write_text(json.dumps([{"id": str(number), "conversations": talk} for number, talk in enumerate(talks)]))
    figures = figures_of(
        "serve", "--port", str(server.port), "--num-prompts", "3",
        "--dataset-name", "sharegpt", "--dataset-path", str(file), "--goodput", "ttft:1e9", "e2el:1e9",
        "--num-warmups", "0",
    )  # fmt: skip
    assert (figures["completed"], figures["failed"]) == (3, 0)  # the one that is long enough, three times
    assert figures["prompt_tokens"] % 3 == figures["output_tokens"] % 3 == 0
    assert figures["output_tokens"] >= 3 * 4
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello there"}\n\n{"prompt": "again"}\n')
    figures = figures_of(
        "serve", "--port", str(server.port), "--dataset-name", "custom", "--dataset-path",
        str(rows), "--custom-output-len", "5", "--custom-skip-chat-template", "--no-oversample", "--num-warmups", "0",
        "--goodput", "ttft:0",
    )  # fmt: skip
    assert (figures["completed"], figures["output_tokens"], figures["request_goodput"]) == (2, 10, 0.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dataset-name sonnet", "'sonnet' is not valid; expected one of: random, sharegpt, custom"),
        ("--dataset-name sharegpt", "--dataset-path is the file"),
        ("--dataset-path a.json", "--dataset-path is the file"),
        ("--sharegpt-output-len 5", "needs --dataset-name sharegpt"),
        ("--goodput itl:100", "'itl' is none of ttft, tpot, e2el"),
        ("--goodput ttft:fast", "has no number of milliseconds"),
        ("--percentile-metrics ttft,foo", "'foo' is none of ttft, tpot, itl, e2el"),
        ("--metric-percentiles 50,x", "numbers from 0 to 100"),
        ("--result-filename a.json", "need --save-result"),
        ("--endpoint v1/completions", "is not a path"),
        ("--header nonsense", "is not NAME=VALUE"),
        ("--port 1", "No answer from http://127.0.0.1:1"),
    ],
)
def test_serve_refuses_by_name(flags: str, words: str, here: Here) -> None:
    status, _, told = here("serve", *flags.split())
    assert status != 0
    assert words in told
    assert "Traceback" not in told


def test_waits_at_a_server(server: servers.Server) -> None:
    """Measure the workloads of `tools.benchmarks.frontier`, as on a simulated device."""
    url = f"http://127.0.0.1:{server.port}"
    clients = [Client(20, 6, 3, begin=0.05), Client(9, 4, 2, times=(0.0, 0.1))]
    waits = asyncio.run(measure(url, clients, "waits"))
    assert {size: len(firsts) for size, firsts in waits.first.items()} == {20: 3, 9: 2}
    assert 0 < len(waits.gaps) <= 3 * 5 + 2 * 3
    assert 0 < min(waits.firsts) <= max(waits.firsts) < waits.total
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(measure(url, [Client(5000, 6)], "refused"))
    assert "HTTP 400" in str(caught.value.exceptions[0])


def test_serve_reports_failures(server: servers.Server, here: Here) -> None:
    flags = ("--num-prompts", "2", "--max-token-id", "300", "--random-input-len", "5000")
    status, out, _ = here("serve", "--port", str(server.port), *flags)
    assert status == 1
    assert "HTTP 400" in out


def test_throughput_and_latency(tiny_llama: Path, figures_of: Figures) -> None:
    args = (str(tiny_llama), "--dtype", "float32", "--input-len", "16", "--output-len", "8")
    guesses = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 2}')
    more = ("--input-len", "100", "--speculative-config.adaptive", "false")
    figures = figures_of("throughput", *args[:-4], *args[-2:], *more, "--num-prompts", "5", "--n", "2", *guesses)
    assert figures["requests"] == 5
    tokens, right = figures["spec_decode_draft_tokens"], figures["spec_decode_accepted_tokens"]
    assert 0 < figures["spec_decode_num_drafts"] <= tokens <= 2 * figures["spec_decode_num_drafts"]
    assert figures["spec_decode_acceptance_rate"] == round(100 * right / tokens, 2)
    assert 1 <= figures["spec_decode_acceptance_length"] <= 3
    assert figures["total_token_throughput"] > figures["output_throughput"] > 0
    assert (figures["num_requests"], figures["total_num_tokens"]) == (5, 5 * (100 + 2 * 8))
    figures = figures_of("latency", *args, "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1")
    assert figures["batches"] == len(figures["latencies"]) == 2
    assert figures["percentiles"]["10"] <= figures["avg_latency"] <= figures["percentiles"]["99"]


def test_startup(tiny_llama: Path, figures_of: Figures) -> None:
    figures = figures_of("startup", "--runs", "1", "--", str(tiny_llama), *servers.WITHOUT_MODEL)
    assert 0 < figures["health_200_s"] <= figures["first_token_s"]
    for request in ("first", "later"):
        assert 0 < figures[f"{request}_request_first_token_s"] <= figures[f"{request}_request_s"]
    assert figures["peak_rss_mib"] > 0
