"""A server among broken distributions of every sort starts and answers as if they were not there."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from ferrule_testkit import server as servers
from tests.fakes.bad_wheels import install_bad
from tools.wheels import Distribution, install


def test_the_server_starts_among_broken_distributions(tiny_llama: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install_bad(site, fatal=False)
    args = [str(tiny_llama), *servers.WITHOUT_MODEL, "--served-model-name", "tiny"]
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
        *servers.WITHOUT_MODEL,
        *servers.FEW_ROUTES,
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


NOISY = """
from fastapi import APIRouter

from ferrule.interfaces.router import Router
from ferrule.interfaces.sampler import LogitsProcessor
from ferrule.interfaces.stats import StatLogger


class Routes(Router):
    def router(self, ctx):
        made = APIRouter()

        @made.get("/noisy")
        async def noisy() -> None:
            raise LookupError("no route out")

        return made


class Figures(StatLogger):
    def __init__(self, config, info):
        ...

    def on_finish(self, stats):
        raise LookupError("no figures")

    def on_engine(self, stats, engine):
        ...

    def on_tokens(self, first, num_tokens, gap):
        ...


class Words(LogitsProcessor):
    def __init__(self):
        ...

    def apply(self, known_ids, num_prompt, logits):
        raise LookupError("no words")
"""


def test_faults_while_it_runs_name_plugin_and_distribution(tiny_llama: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    groups = {
        "ferrule.v1.router": {"noisy": "noisy_parts:Routes"},
        "ferrule.v1.stat_logger": {"noisy": "noisy_parts:Figures"},
        "ferrule.v1.logits_processor": {"noisy": "noisy_parts:Words"},
    }
    install(Distribution(name="noisy-parts", version="1.4", entry_points=groups, files={"noisy_parts.py": NOISY}), site)
    args = [str(tiny_llama), "--dtype", "float32", "--served-model-name", "tiny", "--num-gpu-blocks-override", "512"]
    args += ["--routers", "+noisy", "--logits-processor-pattern", "noisy"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}) as server:

        def status(path: str, body: bytes | None = None) -> int:
            request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=240) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code

        completion = '{"model": "tiny", "prompt": "hello", "max_tokens": 1%s}'
        assert status("/noisy") == 500
        assert status("/v1/completions", (completion % ', "logits_processors": ["noisy"]').encode()) == 500
        for _ in range(3):
            assert status("/v1/completions", (completion % "").encode()) == 200
        log = server.text()
    for told in (
        "plugin router:noisy of noisy-parts 1.4 raised in GET /noisy\n",
        "plugin logits_processor:noisy of noisy-parts 1.4 raised in apply\n",
        "plugin stat_logger:noisy of noisy-parts 1.4 raised in on_finish (1 of 3)\n",
    ):
        assert told + "    | Traceback" in log
    assert log.count("plugin stat_logger:noisy of noisy-parts 1.4 is disabled after 3 faults") == 1
