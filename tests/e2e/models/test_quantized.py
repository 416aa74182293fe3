"""`-q NAME` on the real server: it answers, says what it runs, and gives its weights back and takes them again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from ferrule import LLM, SamplingParams
from ferrule_contrib import tiny
from ferrule_testkit import server as servers
from ferrule_testkit.quantized import quantized_checkpoint

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
MOST_BYTES = 6e6  # 7 MB in bfloat16, 14 in float32, and the head's table once more


def test_the_embedded_model_in_four_bits(tmp_path: Path) -> None:
    args = ["-q", "int4", "--enable-sleep-mode", "--num-gpu-blocks-override", "64", *servers.FEW_ROUTES, "admin"]
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
    assert told["quantization"] == "int4"
    assert told["weight_bytes"] < MOST_BYTES
    assert "Paris" in before
    assert after == before
    log = (tmp_path / "log").read_text()
    assert "M parameters, int4" in log


def test_the_embedded_model_in_eight_bits() -> None:
    params = SamplingParams(temperature=ASK["temperature"], max_tokens=ASK["max_tokens"])
    model = str(tiny.path())
    with LLM(model, quantization="int8", enable_sleep_mode=True, num_gpu_blocks_override=64) as llm:
        told = llm.model
        before = llm.chat(ASK["messages"], params)[0].outputs[0].text
        llm.sleep(2)
        llm.wake_up()
        after = llm.chat(ASK["messages"], params)[0].outputs[0].text
    assert (told.quantization, told.weight_bytes < MOST_BYTES) == ("int8", True)
    assert "Paris" in before
    assert after == before


@pytest.mark.parametrize("name", ["torchao-int4", "gptq", "awq", "packed-zeros"])
def test_a_quantized_checkpoint_says_what_its_weights_mean(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Compare with a checkpoint of float32 weights that are the same numbers: token for token, logprobs to rounding.

    Scales, and what zero points make of them, are bfloat16 on a CPU: a part in 512 of a weight at most.
    """
    source, made = Path(shutil.copytree(tiny_llama, tmp_path / "source")), tmp_path / "made"
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
