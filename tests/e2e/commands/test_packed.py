"""`ferrule pack` on the command line, and the real server on what it wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ferrule_contrib import tiny
from ferrule_kernels.cpu import dense
from ferrule_testkit import server as servers

ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}


@pytest.mark.slow  # tests/unit/plugins/command/test_packed.py packs and loads in one process
@pytest.mark.skipif(dense.unit() is None, reason="there are no kernels for bfloat16 weights here")
def test_the_embedded_model_from_a_packed_folder(tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    command = [sys.executable, "-m", "ferrule", "pack", str(tiny.path()), str(out), "--dtype", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Serve it: ferrule serve '{out}' --dtype bfloat16" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 2
    assert "--force replaces it" in again.stderr
    args = [str(out), "--dtype", "bfloat16", "--enable-sleep-mode", "--num-gpu-blocks-override", "64"]
    env = {"OMP_NUM_THREADS": "1", "FERRULE_SERVER_DEV_MODE": "1"}
    with (
        servers.running(args, tmp_path / "log", env) as server,
        httpx.Client(base_url=server.url, timeout=240) as client,
    ):
        told = client.get("/server_info").json()["model"]
        before = client.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]["content"]
        assert client.post("/sleep?level=2").status_code == 200
        assert client.post("/wake_up").status_code == 200
        after = client.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]["content"]
    assert told["quantization"] == "ferrule_packed"
    assert "Paris" in before
    assert after == before
