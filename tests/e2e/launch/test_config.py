"""A documented command line on the real server: notices in the log, values where they were given, and it serves."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from ferrule import LLM, SamplingParams
from ferrule.log import flush
from ferrule_testkit.server import running


def test_a_command_line_for_vllm_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: [documented]\nmax-num-seqs: 9\nswap-space: 8\n")
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.setenv("FERRULE_MAX_NUM_SEQS", "4")
    argv = ["--config", str(file), "-tp", "1", "-O3", "--no-enable-lora", "--max-model-len", "auto"]
    argv += ["--rope-theta", "10000", "--kv-cache-dtype", "auto", "--guided-decoding-backend", "auto"]
    with running(argv, tmp_path / "log") as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=240) as response:
            models = json.load(response)
        assert server.says("ready at")
    log = server.text()
    assert models["data"][0]["id"] == "documented"
    for said in (
        f"{file}:3: swap-space is accepted without effect",
        "--compilation-config: level 3 is as level 2 on CPU",
        "--rope-theta is replaced by --hf-overrides.rope_theta, which has got the value.",
        "Environment variable VLLM_USE_V1 has no effect: there is one engine.",
    ):
        assert log.count(said) == 1, said
    assert "VLLM_PORT" not in log


def test_a_configuration_from_another_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Use --hf-config-path for `LLM`; the notices of its arguments are in its log."""
    from ferrule_contrib import tiny

    config = json.loads((tiny.path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with LLM(str(tiny.path()), hf_config_path=str(tmp_path), swap_space=8, max_num_seqs=2) as llm:
        assert llm.model.max_model_len == 64
        (output,) = llm.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 2
    flush(240)
    assert "swap_space is accepted without effect" in capfd.readouterr().err
