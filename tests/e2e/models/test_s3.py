"""`ferrule serve s3://bucket/folder`: the weights are streamed from the store, and never written to the disk."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ferrule_testkit import server as servers
from tests.fake_s3 import KEY_ID, SECRET, environment, fake_s3


@pytest.mark.slow  # the parts of it are tested in tests/unit/files/test_s3.py
def test_a_model_of_a_store_answers(tiny_llama: Path, tmp_path: Path) -> None:
    objects = {f"models/tiny/{file.name}": file.read_bytes() for file in tiny_llama.iterdir() if file.is_file()}
    log, cache = tmp_path / "log", tmp_path / "cache"
    with fake_s3({"bucket": objects}) as store:
        variables = {**environment(store), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
        args = ["s3://bucket/models/tiny/", "--load-format", "runai_streamer", "--num-gpu-blocks-override", "64"]
        with servers.running(args, log, variables) as server:
            asked = {"model": args[0], "prompt": "hello", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=240)
        streamed = {path for _, path in store.requests if path.endswith(".safetensors")}
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert streamed
    assert list(cache.rglob("config.json"))
    assert not list(cache.rglob("*.safetensors"))
    said = log.read_text()
    assert SECRET not in said
    assert KEY_ID not in said
