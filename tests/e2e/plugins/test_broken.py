"""A server among broken distributions of every sort starts and answers as if they were not there."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from ferrule_testkit import server as servers
from ferrule_testkit.bad_wheels import install_bad


def test_the_server_starts_among_broken_distributions(tiny_llama: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install_bad(site, fatal=False)
    args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--num-gpu-blocks-override", "512"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    with servers.running(args, tmp_path / "log", environment) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            b'{"model": "tiny", "prompt": "hello", "max_tokens": 3}',
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=240) as response:
            assert response.status == 200
        assert "noise" not in server.text()


def test_a_broken_one_that_is_chosen_stops_the_start_with_one_block(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install_bad(site, fatal=False)
    command = [
        sys.executable,
        "-m",
        "ferrule",
        "serve",
        "--scheduling-policy",
        "extra",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert "policy:extra of extra-dist 1.0 cannot be imported" in done.stderr
    assert "pip install 'extra-dist[gpu]'" in done.stderr
    assert "Traceback" not in done.stderr
