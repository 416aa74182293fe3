"""`-q NAME` on the real server: it answers, says what it runs, and gives its weights back and takes them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from ferrule import LLM, SamplingParams
from ferrule_testkit import server as servers
from ferrule_testkit.checkpoints import tiny_checkpoint
from ferrule_testkit.quantized import quantized_checkpoint

ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 24}


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_embedded_model_in_fewer_bits(method: str, tmp_path: Path) -> None:
    args = ["-q", method, "--enable-sleep-mode", "--num-gpu-blocks-override", "64"]
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
    assert told["quantization"] == method
    assert told["weight_bytes"] < 6e6  # 7 MB in bfloat16, 14 in float32, and the head's table once more
    assert "Paris" in before
    assert after == before
    log = (tmp_path / "log").read_text()
    assert f"M parameters, {method}" in log


@pytest.mark.parametrize("name", ["torchao-int4", "gptq", "awq", "packed-zeros"])
def test_a_quantized_checkpoint_says_what_its_weights_mean(name: str, tmp_path: Path) -> None:
    """Compare with a checkpoint of float32 weights that are the same numbers: token for token, logprobs to rounding.

    Scales, and what zero points make of them, are bfloat16 on a CPU: a part in 512 of a weight at most.
    """
    source, made = tiny_checkpoint("llama", tmp_path / "source"), tmp_path / "made"
    meant = quantized_checkpoint(source, made, name)
    file = source / "model.safetensors"
    save_file({**load_file(file), **meant}, file, metadata={"format": "pt"})
    prompts: list[Any] = [{"prompt_token_ids": [1, *range(5, 5 + length)]} for length in (3, 17, 40)]
    answers = []
    for folder in (source, made):
        with LLM(str(folder), dtype="float32", num_gpu_blocks_override=256) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True))
            answers.append([output.outputs[0] for output in outputs])
    for expected, answer in zip(*answers, strict=True):
        assert answer.token_ids == expected.token_ids
        assert answer.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=0.15)


def test_a_method_that_is_not_there(tmp_path: Path) -> None:
    with servers.started(["-q", "quip"], tmp_path / "log") as server:
        assert server.process.wait(240) != 0
    log = (tmp_path / "log").read_text()
    assert "quip" in log
    assert "int8_per_channel_weight_only" in log
    assert "Traceback" not in log
