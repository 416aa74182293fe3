"""Plugins in the real server: a policy and hooks from files, in every process; and start-up with a broken one."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import openai

from ferrule_testkit import server as servers

HOOKS = """
import json, os
from pathlib import Path
from prometheus_client import Counter
from ferrule.interfaces.hooks import Hooks

LOG = Path(__file__).with_suffix(".log")


class Tell(Hooks):
    def _say(self, *what):
        with LOG.open("a") as log:
            print(json.dumps([os.getpid(), *what]), file=log)

    def process_started(self, process):
        self._say("started", process)

    def process_stopping(self, process, status):
        self._say("stopping", process, status)

    def request_admitted(self, request_id, model, prompt_tokens, params):
        self.admitted.inc()
        self._say("admitted", request_id, model, prompt_tokens, params.max_tokens)

    def request_finished(self, request_id, stats):
        self._say("finished", request_id, str(stats.finish), stats.generation_tokens)

    def step_stats(self, stats):
        raise ValueError("no interest in figures")

    def authorise(self, access):
        return {"front": True, "back": False}.get(access.headers.get("x-door"))

    def register_metrics(self, registry):
        self.admitted = Counter("tell_admitted", "Requests heard of.", registry=registry)

    def report_header(self, config):
        return [f"telling about {config.model_names[0]}"]
"""

POLICY = """
from ferrule.interfaces.scheduler import SchedulingPolicy


class Newest(SchedulingPolicy):
    def key(self, view, now):
        return (-view.sequence,)

    def victim(self, running):
        return running[0].id
"""


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=240) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_plugins_from_files_work_in_every_process(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(HOOKS)
    (tmp_path / "newest.py").write_text(POLICY)
    args = [str(tiny_llama), *servers.WITHOUT_MODEL, "--served-model-name", "tiny", "--num-gpu-blocks-override", "64"]
    args += servers.FEW_ROUTES
    args += ["--plugin", f"hooks={tmp_path / 'tell.py'}", f"policy={tmp_path / 'newest.py'}"]
    args += ["--scheduling-policy", "newest", "--api-key", "secret"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=240) as client:
            answer = client.completions.create(model="tiny", prompt="hello", max_tokens=5, n=2)
        models = f"{server.url}/v1/models"
        doors = {door: status_of(models, **{"x-door": door}) for door in ("front", "back", "none")}
        with_key = status_of(models, **{"x-door": "back", "authorization": "Bearer secret"})
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.url}/metrics", headers={"x-door": "front"}), timeout=240
        ) as response:
            metrics = response.read().decode()
        pids = server.children()
        assert server.stop() == 0
        log = server.text()
    assert doors == {"front": 200, "back": 401, "none": 401}
    assert with_key == 401
    assert "tell_admitted_total 2.0" in metrics
    assert "vllm:" in metrics
    heard = [json.loads(line) for line in (tmp_path / "tell.log").read_text().splitlines()]
    started = {name: pid for pid, what, name, *_ in heard if what == "started"}
    assert set(started) == {"launcher", "engine-0", "api-0"}
    assert (started["engine-0"], started["api-0"]) == (pids["engine"], pids["api"])
    assert {tuple(rest) for _, what, *rest in heard if what == "stopping"} == {
        ("launcher", 0),
        ("engine-0", 0),
        ("api-0", 0),
    }
    admitted = [rest for _, what, *rest in heard if what == "admitted"]
    finished = {rest[0]: rest[1:] for _, what, *rest in heard if what == "finished"}
    assert answer.usage is not None
    assert [rest[1:] for rest in admitted] == [["tiny", answer.usage.prompt_tokens, 5]] * 2
    assert sum(tokens for _, tokens in finished.values()) == answer.usage.completion_tokens
    assert {rest[0] for rest in admitted} == set(finished)
    assert "telling about tiny" in log


def test_a_broken_plugin_that_was_named_stops_the_start_in_one_block(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "newest.py").write_text("import sys\nsys.exit(0)\n" + POLICY)
    args = [sys.executable, "-m", "ferrule", "serve", str(tiny_llama), "--host", "127.0.0.1", "--port", "0"]
    args += ["--plugin", f"policy={tmp_path / 'newest.py'}", "--scheduling-policy", "newest"]
    args += [*servers.WITHOUT_MODEL, *servers.FEW_ROUTES]
    done = subprocess.run(args, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "it called sys.exit(0) while it was imported" in done.stderr
    assert "newest.py" in done.stderr
    assert "Traceback" not in done.stderr
