"""The name of an API key reaches the engine over HTTP, and the policy `fair` does not let one key delay another.

The scheduler that tells what it admits is named by its import path.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from ferrule_testkit import server as servers

SCHEDULER = '''
import json
import time
from pathlib import Path

from ferrule.engine.scheduler import DefaultScheduler

HERE = Path(__file__).parent


class Told(DefaultScheduler):
    """Writes down whose requests are admitted, and holds the engine until there is a file `open`."""

    def __init__(self, limits, policy, plugins=None):
        super().__init__(limits, policy, plugins)
        self.names = {}

    def add(self, request, now):
        self.names[request.id] = request.key_name
        super().add(request, now)

    def schedule(self, now):
        plan = super().schedule(now)
        with (HERE / "admitted.jsonl").open("a") as log:
            for admit in plan.admits if plan else ():
                print(json.dumps(self.names[admit.id]), file=log)
        while plan and not (HERE / "open").exists():
            time.sleep(0.002)
        return plan
'''


@pytest.mark.parametrize(
    ("policy", "places"),
    [("fair", (1, 2)), ("fcfs", (4,))],  # behind the one that runs, and at most one that began to wait before it
)
def test_a_busy_key_does_not_delay_another(
    tiny_llama: Path, tmp_path: Path, policy: str, places: tuple[int, ...]
) -> None:
    (tmp_path / "told_scheduler.py").write_text(SCHEDULER)
    (tmp_path / "keys.yaml").write_text("busy: first-secret\nquiet: second-secret\n")
    log = tmp_path / "admitted.jsonl"
    args = [str(tiny_llama), *servers.WITHOUT_MODEL, "--served-model-name", "tiny", "--num-gpu-blocks-override", "64"]
    args += servers.FEW_ROUTES
    args += ["--scheduler-cls", "told_scheduler.Told", "--scheduling-policy", policy, "--max-num-seqs", "1"]
    args += ["--api-key-file", str(tmp_path / "keys.yaml"), "--watchdog-timeout", "900"]

    def ask(key: str) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=240) as client:
            client.completions.create(model="tiny", prompt="hello", max_tokens=4)

    with (
        servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}) as server,
        ThreadPoolExecutor(5) as threads,
    ):
        answers = [threads.submit(ask, "first-secret")]
        assert servers.until(log.exists)  # the first one runs, and the engine is held
        for number, key in enumerate(["first-secret"] * 3 + ["second-secret"], 2):
            answers.append(threads.submit(ask, key))
            assert servers.until(lambda number=number: server.taken() == number)
        (tmp_path / "open").touch()
        for answer in answers:
            answer.result(240)
        assert server.stop() == 0
    admitted = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(admitted) == ["busy"] * 4 + ["quiet"]
    assert admitted.index("quiet") in places, admitted
