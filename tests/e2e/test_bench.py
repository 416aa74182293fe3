"""`ferrule bench`: each benchmark runs on real parts, and its figures add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ferrule_testkit import server as servers


def bench(out: Path, *args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ferrule", "bench", args[0], "--output-json", str(out), *args[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FERRULE_CPU_KVCACHE_SPACE": "0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_serve(server: servers.Server, tmp_path: Path) -> None:
    figures = bench(
        tmp_path / "serve.json", "serve", "--port", str(server.port), "--num-prompts", "12", "--max-concurrency", "4",
        "--random-input-len", "48", "--random-prefix-len", "32", "--random-output-len", "6", "--max-token-id", "300",
    )  # fmt: skip
    assert (figures["completed"], figures["failed"], figures["model"]) == (12, 0, "tiny")
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (12 * 48, 12 * 6)
    assert 0 < figures["p50_ttft_ms"] <= figures["p99_ttft_ms"] <= figures["p99_e2el_ms"]


def test_serve_reports_failures(server: servers.Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ferrule", "bench", "serve", "--port", str(server.port), "--num-prompts", "2"]
    done = subprocess.run(
        [*command, "--max-token-id", "300", "--random-input-len", "5000"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "HTTP 400" in done.stdout


def test_throughput_and_latency(tiny_llama: Path, tmp_path: Path) -> None:
    args = (str(tiny_llama), "--dtype", "float32", "--input-len", "16", "--output-len", "8")
    figures = bench(tmp_path / "throughput.json", "throughput", *args, "--num-prompts", "5", "--n", "2")
    assert figures["requests"] == 5
    assert figures["total_token_throughput"] > figures["output_throughput"] > 0
    figures = bench(
        tmp_path / "latency.json", "latency", *args, "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"
    )
    assert figures["batches"] == 2


def test_startup(tiny_llama: Path, tmp_path: Path) -> None:
    figures = bench(tmp_path / "startup.json", "startup", "--runs", "1", "--", str(tiny_llama), "--dtype", "float32")
    assert 0 < figures["health_200_s"] <= figures["first_token_s"]
    assert figures["peak_rss_mib"] > 0
