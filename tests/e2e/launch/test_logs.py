"""What the server says in its log, how that is configured, and what never gets there; and `/metrics` as scraped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from ferrule_plugins.stat_logger import catalog
from ferrule_testkit import server as servers

ARGS = ["--dtype", "float32", "--served-model-name", "tiny", *servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
PROMPT = "the quick brown fox"
IDS = [201, 202, 203]


def ask(server: servers.Server, key: str | None = None, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    given = {"model": "tiny", "max_tokens": 3, "ignore_eos": True, **body}
    return httpx.post(f"{server.url}/v1/completions", json=given, headers=headers, timeout=240)


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ferrule", "serve", *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **env},
    )


# ------------------------------------------------------------------------------------------------ configuration


def log_config(sink: Path) -> str:
    return json.dumps(
        {
            "version": 1,
            "formatters": {"f": {"format": "%(levelname)s|%(process)d|%(name)s|%(message)s"}},
            "handlers": {"h": {"class": "logging.FileHandler", "filename": str(sink), "formatter": "f"}},
            "loggers": {
                "vllm": {"handlers": ["h"], "level": "INFO", "propagate": False},
                "uvicorn.error": {"handlers": ["h"], "level": "WARNING", "propagate": False},
            },
        },
        indent=1,
    )


def test_the_log_goes_where_a_file_says(tiny_llama: Path, tmp_path: Path) -> None:
    """Log from all processes, with their fields, on one line each; a file written for vLLM works."""
    sink, file = tmp_path / "lines", tmp_path / "log.json"
    file.write_text(log_config(sink))
    args = [str(tiny_llama), *ARGS, "-asc", "2", "--enable-log-requests", "--log-config-file", str(file)]
    with servers.running(args, tmp_path / "out", {"OMP_NUM_THREADS": "1"}) as server:
        assert ask(server, prompt="two\nlines INFO|1|ferrule.api|forged").status_code == 200
        assert server.stop() == 0
        assert server.text() == ""
    rows = [row.split("|", 3) for row in sink.read_text().splitlines()]
    assert {len(row) for row in rows} == {4}
    names = {row[2] for row in rows}
    assert {"ferrule.api", "ferrule.worker", "ferrule.access"} <= names
    assert "uvicorn.error" not in names
    assert len({row[1] for row in rows}) == 3  # the engine and both API processes
    (request,) = [row[3] for row in rows if row[2] == "ferrule.frontend" and row[3].startswith("request ")]
    assert 'prompt="two\\\\nlines INFO|1|ferrule.api|forged"' in request


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"version": 1,\n "handlers": {,}}', "line 2, column 15"),
        ('{"version": 1,\n "handlers": {\n  "h": {"class": "no.Such"}}}', "line 3: Unable to configure handler 'h'"),
        ("[]", "a JSON object is expected"),
        ('{"version": 7}', "7"),
    ],
)
def test_a_bad_file_is_one_block(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "log.json"
    file.write_text(text)
    done = run(VLLM_LOGGING_CONFIG_PATH=str(file)) if text == "[]" else run("--log-config-file", str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------ content


def requests(server: servers.Server) -> list[str]:
    return re.findall(r"\[api frontend\] request (.*)", server.text())


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        # a whole prompt is in the log of test_the_log_goes_where_a_file_says
        pytest.param([], [PROMPT, "201, 202, 203"], marks=pytest.mark.slow),
        # tests/unit/frontend/test_service.py cuts prompts too
        pytest.param(["--max-log-len", "2"], ["=th", "201, 202)"], marks=pytest.mark.slow),
        (["--max-log-len", "0"], []),
    ],
)
def test_prompts_in_the_log_and_a_prefix(tiny_llama: Path, tmp_path: Path, args: list[str], shown: list[str]) -> None:
    env = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_PREFIX": "[a1] "}
    with servers.running([str(tiny_llama), *ARGS, "--enable-log-requests", *args], tmp_path / "log", env) as server:
        assert ask(server, prompt=PROMPT).status_code == ask(server, prompt=IDS).status_code == 200
        assert server.stop() == 0
        assert server.says("ready at")
        assert all(line.startswith("[a1] ") for line in server.text().splitlines())
        text, ids = requests(server)
        for piece, line in zip(shown, (text, ids), strict=False):
            assert piece in line
        if args:
            assert "quick" not in server.text()
            assert "203" not in ids.partition("prompt=")[2]
        if not shown:
            assert not re.search(r"\d|\w", text.partition(" prompt=")[2] + ids.partition(" prompt=")[2])


def test_quiet_and_secret(tiny_llama: Path, tmp_path: Path) -> None:
    """Log no line per request and no engine figures; no key is in the log or in an error, right or wrong."""
    args = [str(tiny_llama), *ARGS, "--disable-log-requests", "--disable-log-stats", "--log-level", "debug"]
    env = {"OMP_NUM_THREADS": "1", "VLLM_API_KEY": "sk-of-variable-9"}
    keys = ["sk-right-1", "sk-wrong-2", "sk-admin-3", "hf_token-4", "sk-of-variable-9"]
    args += ["--api-key", keys[0], "--admin-key", keys[2], "--hf-token", keys[3]]
    with servers.running(args, tmp_path / "log", env) as server:
        answer = ask(server, keys[0], prompt=PROMPT)
        assert answer.status_code == 200
        refused = ask(server, keys[1], prompt=PROMPT)
        assert refused.status_code == 401
        assert ask(server, keys[0], prompt=PROMPT, user=keys[1], api_key=keys[1]).status_code == 200
        assert httpx.get(f"{server.url}/v1/models?api_key={keys[1]}", timeout=240).status_code == 401
        text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {keys[0]}"}, timeout=240).text
        assert "vllm:" not in text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 2.0' in text
        assert "process_cpu_seconds_total" in text
        assert server.stop() == 0
        assert requests(server) == []
        for key in keys:
            assert key not in server.text() + refused.text + answer.text + text


@pytest.mark.slow
def test_one_process_alone_writes_the_periodic_line(tiny_llama: Path, tmp_path: Path) -> None:
    args = [str(tiny_llama), *ARGS, "-asc", "2"]

    def told() -> bool:
        ask(server, prompt=PROMPT, max_tokens=50)
        return "Avg generation throughput" in server.text()

    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        assert servers.until(told)
        assert server.stop() == 0
        lines = [line for line in server.text().splitlines() if "Avg generation throughput" in line]
        assert all("[api-0 stats]" in line for line in lines)
        assert re.search(r"Engine 000: Avg prompt throughput: [\d.]+ tokens/s, .*KV cache usage: [\d.]+%", lines[0])


# ------------------------------------------------------------------------------------------------ metrics


@pytest.fixture(scope="module")
def left_alone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Family], str]:
    """Return the figures and the log of a server that is told to leave the log alone, after two requests."""
    args = [str(tiny_llama), *ARGS, "--show-hidden-metrics-for-version", "0.8"]
    env = {"OMP_NUM_THREADS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    with servers.running(args, tmp_path_factory.mktemp("scraped") / "log", env) as server:
        for _ in range(2):
            assert ask(server, prompt=PROMPT * 3, n=2).status_code == 200
        text = httpx.get(f"{server.url}/metrics", timeout=240).text
        assert server.stop() == 0
    return {family.name: family for family in text_string_to_metric_families(text)}, server.text()


@pytest.fixture
def scraped(left_alone: tuple[dict[str, Family], str]) -> dict[str, Family]:
    return left_alone[0]


def test_a_log_that_is_left_alone(left_alone: tuple[dict[str, Family], str]) -> None:
    assert "INFO" not in left_alone[1]


def test_every_documented_name_has_its_type_and_labels(scraped: dict[str, Family]) -> None:
    for metric in (*catalog.SERVED, *catalog.HTTP):
        family = scraped[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert family.type == metric.kind
        assert family.samples or metric.values is None
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {*metric.common, *metric.labels}, metric.name
            assert sample.labels.get("model_name", "tiny") == "tiny"
            assert sample.labels.get("engine", "0") == "0"
    for name, kind, labels, _ in catalog.PROCESS:
        family = scraped[name.removesuffix("_total") if kind == "counter" else name]
        assert (family.type, set(family.samples[0].labels)) == (kind, set(labels))
    for name, _, _ in catalog.ABSENT:
        assert name.removesuffix("_total") not in scraped


def test_figures_are_true(scraped: dict[str, Family]) -> None:
    """Count two requests for two choices of three tokens each; the second finds its prompt in the cache."""
    figures = {
        (
            sample.name.removeprefix("vllm:"),
            *(v for k, v in sorted(sample.labels.items()) if k not in COMMON),
        ): sample.value
        for family in scraped.values()
        for sample in family.samples
    }
    prompt = figures["request_prompt_tokens_sum",] / 4
    cached = figures["prompt_tokens_by_source_total", "local_cache_hit"]
    assert figures["prompt_tokens_total",] == 4 * prompt
    assert 0 < cached == figures["prompt_tokens_cached_total",] < 4 * prompt
    assert figures["request_prefill_kv_computed_tokens_sum",] == 4 * prompt - cached
    assert figures["prompt_tokens_by_source_total", "local_compute"] == 4 * prompt - cached
    assert figures["generation_tokens_total",] == figures["request_generation_tokens_sum",] == 12
    assert figures["iteration_tokens_total_sum",] > 12
    assert figures["request_params_n_count",] == figures["request_max_num_generation_tokens_count",] == 2
    assert figures["request_params_n_sum",] == 4
    assert figures["request_params_max_tokens_sum",] == 12
    assert figures["request_success_total", "length"] == 4
    assert figures["time_in_queue_requests_count",] == figures["request_queue_time_seconds_count",] == 4
    assert figures["inter_token_latency_seconds_count",] == figures["time_per_output_token_seconds_count",] == 8
    assert figures["kv_cache_usage_perc",] == figures["gpu_cache_usage_perc",] == 0
    assert figures["http_requests_total", "/v1/completions", "POST", "2xx"] == 2


COMMON = {"model_name", "engine"}
