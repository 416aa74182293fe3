"""A server whose policy is random in order, victims and budgets answers what a server with the default one does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from ferrule_testkit import server as servers

# A cache of 19 blocks of 16 tokens: three of the eight requests need more at their ends, so that some are preempted
# however slowly they arrive.
ARGS = [
    "--dtype",
    "float32",
    "--served-model-name",
    "tiny",
    "--num-gpu-blocks-override",
    "20",
    "--debug",
    *servers.FEW_ROUTES,
]
ASK = {"model": "tiny", "max_tokens": 90, "ignore_eos": True, "temperature": 0, "logprobs": 1, "return_token_ids": True}
PROMPTS = [[5 + number, *range(20, 30 + 3 * number)] for number in range(8)]


def _answers(server: servers.Server) -> list[Any]:
    """Return the answers to all requests, which are sent at once."""
    with httpx.Client(base_url=server.url, timeout=servers.PATIENCE) as http:

        def ask(number: int) -> Any:
            body = ASK | {"prompt": PROMPTS[number], "temperature": float(number % 2), "seed": number}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            return list(threads.map(ask, range(len(PROMPTS))))


def test_chaos_changes_no_answer(server: servers.Server, tiny_llama: Path, tmp_path: Path) -> None:
    expected = _answers(server)
    args = [str(tiny_llama), *ARGS, "--scheduling-policy", "chaos"]
    with servers.running(args, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as chaotic:
        assert _answers(chaotic) == expected
        metrics = httpx.get(f"{chaotic.url}/metrics", timeout=servers.PATIENCE).text
        (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total{")]
        assert float(line.split()[-1]) > 0
        assert chaotic.health() == 200  # it has checked itself, and is well
        assert chaotic.stop() == 0
