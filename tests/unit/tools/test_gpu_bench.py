"""The GPU benchmark without a GPU: what it computes, how it goes on after a failure, and the file that it writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks import gpu as gpu_bench
from tools.benchmarks.gpu_models import (
    DRY,
    FULL,
    SHAPES,
    TINY,
    Request,
    batch_seconds,
    decode_seconds,
    prefill_seconds,
    requests,
)
from tools.benchmarks.gpu_parts import PARTS, busy_seconds

LIMITS = {"name": "Abacus 9", "copy_bytes": 4e12, "half": "bfloat16", "half_flops": 7e14, "fp8_flops": None}


def _attention(name: str, share: float, error: str | None = None) -> dict[str, Any]:
    return {"module": "attention", "name": name, "limit_share": share, "error": error}


ANSWERS: Mapping[str, Any] = {
    "limits": LIMITS,
    "kernels": [
        _attention("decode 64 x 4k, 8B", 0.85),
        _attention("decode 64 x 4k, 0.6B", 0.9),
        _attention("decode 64 x 4k, 8B in 8 bits", 0.6),
        _attention("decode 64 x 4k, 14B", 0.0, "RuntimeError: no"),
        _attention("decode 1 x 32k, 8B", 0.5),
        _attention("64 decode beside a prefill of 2k, 8B", 0.4),
    ],
    "ferrule": {"decode_share": 0.8, "prefill_share": 0.5, "idle_share": 0.04, "startup_seconds": 20.0},
    "transformers": {"output_tokens_per_second": 900.0},
}


@pytest.mark.parametrize(("name", "millions"), [("qwen3-0.6b", 596), ("llama-3.1-8b", 8030), ("qwen3-14b", 14768)])
def test_shapes_are_those_of_the_models(name: str, millions: int) -> None:
    """Compare with the models' cards: 0.6, 8.0 and 14.8 billion; a tied head is counted once, an embedding once
    more.
    """
    shape = SHAPES[name]
    tables = 1 if shape.config["tie_word_embeddings"] else 2
    assert (shape.body + tables * shape.head) / 1e6 == pytest.approx(millions, rel=0.002)


def test_a_shape_is_a_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    for shape in (*SHAPES.values(), TINY):
        shape.write(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        assert config["architectures"]
        assert config["head_dim"] == shape.config["head_dim"]


def test_requests_are_the_same_every_time() -> None:
    work = requests(FULL, 151936)
    assert work == requests(FULL, 151936)
    assert work != requests(FULL, 151936, seed=1)
    assert len(work) == 256
    sizes = [size for request in work for size in (len(request.prompt), request.out)]
    assert 100 <= min(sizes) < 130
    assert 1000 < max(sizes) <= 1024
    assert max(len(request.prompt) + request.out for request in work) < FULL.max_len
    assert all(token < 320 for request in requests(DRY, 320) for token in request.prompt)


def test_a_stream_is_limited_by_what_it_reads() -> None:
    """Read 8 billion weights of two bytes, less the embedding, at 4 TB/s in 3.75 ms; a context of 8192 tokens is 1
    GiB.
    """
    shape = SHAPES["llama-3.1-8b"]
    assert decode_seconds(shape, 0, 4e12) == pytest.approx(3.75e-3, rel=0.01)
    assert decode_seconds(shape, 8192, 4e12) - decode_seconds(shape, 0, 4e12) == pytest.approx(2**30 / 4e12)


def test_a_prompt_is_limited_by_its_products() -> None:
    shape = SHAPES["llama-3.1-8b"]
    products = 2 * shape.body * 8192 / 7e14
    assert products < prefill_seconds(shape, 8192, 7e14) < 1.2 * products


def test_many_requests_are_limited_by_products_or_by_bytes() -> None:
    work = [Request([1] * 10, 5), Request([1] * 20, 7)]
    reads = 7 * (TINY.body + TINY.head) * 2 + (sum(range(11, 15)) + sum(range(21, 27))) * TINY.kv_bytes
    assert batch_seconds(TINY, work, copy_bytes=1.0, flops=1e30) == pytest.approx(reads)
    slow = batch_seconds(TINY, work, copy_bytes=1e30, flops=1.0)
    assert slow > 2 * TINY.body * (14 + 26) + 2 * TINY.head * 12
    assert batch_seconds(TINY, [Request([1] * 10, 5)], 1e30, 1.0) < slow


def _event(begin: float, end: float, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "ts": begin, "dur": end - begin}


def test_launches_that_overlap_count_once() -> None:
    events = [_event(0, 1), _event(30, 40), _event(35, 45), _event(44, 44.5), _event(60, 80), _event(99, 100)]
    others = [_event(25, 75, "cpu_op"), {"cat": "kernel", "ts": 50}]
    assert busy_seconds([*others, *events[::-1]]) == pytest.approx(37e-6)
    assert busy_seconds(others) == 0.0


class Machine:
    """A machine that measures parts; `broken` ones fail."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, asked: Mapping[str, Any], seconds: float) -> Any:
        self.asked.append((asked["part"], asked["model"]))
        if asked["part"] in self.broken:
            raise RuntimeError(f"exit status 1: Traceback\n  File {__file__}\nRuntimeError: {asked['part']} is broken")
        return ANSWERS[asked["part"]]


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, machine: Machine, *argv: str) -> dict[str, Any]:
    monkeypatch.setattr(gpu_bench, "run_part", machine)
    status = gpu_bench.main(["--name", "abacus", "--out", str(folder), *argv])
    report: dict[str, Any] = json.loads((folder / "gpu-abacus.json").read_text())
    assert status == (1 if report["failures"] else 0)
    return report


def test_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    report = _run(monkeypatch, tmp_path, machine)
    assert report["limits"] == LIMITS
    assert set(report["models"]) == set(SHAPES)
    assert report["models"]["qwen3-14b"] == {name: ANSWERS[name] for name in ("ferrule", "transformers")}
    met = {goal["goal"].split(",")[0]: goal["met"] for goal in report["goals"]}
    assert met["single stream"] is True
    assert met["prompt of 8192 tokens"] is False
    assert met["seconds to start"] is False
    assert [goal["found"] for goal in report["goals"] if "attention" in goal["goal"]] == [0.85]
    assert machine.asked[0] == ("limits", None)
    assert "| qwen3-0.6b | – | 900 |" in capsys.readouterr().out


def test_a_part_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = _run(monkeypatch, tmp_path, Machine("kernels", "transformers"), "--models", "qwen3-0.6b")
    assert report["failures"] == [
        {"part": "kernels", "model": None, "error": "RuntimeError: kernels is broken"},
        {"part": "transformers", "model": "qwen3-0.6b", "error": "RuntimeError: transformers is broken"},
    ]
    assert report["models"] == {"qwen3-0.6b": {"ferrule": ANSWERS["ferrule"]}}


def test_without_limits_there_are_no_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine("limits")
    report = _run(monkeypatch, tmp_path, machine)
    assert machine.asked == [("limits", None)]
    assert {failure["error"] for failure in report["failures"][1:]} == {"the machine's limits are not known"}


def test_parts_can_be_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _run(monkeypatch, tmp_path, Machine("transformers"))
    machine = Machine()
    report = _run(monkeypatch, tmp_path, machine, "--parts", "transformers", "--models", "qwen3-0.6b")
    assert machine.asked == [("transformers", "qwen3-0.6b")]
    assert report["models"]["qwen3-0.6b"]["ferrule"] == ANSWERS["ferrule"]
    assert {failure["model"] for failure in report["failures"]} == set(SHAPES) - {"qwen3-0.6b"}
    with pytest.raises(SystemExit):
        _run(monkeypatch, tmp_path, machine, "--parts", "limits", "--dry")


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("it was started"))
    assert gpu_bench.main(["--name", "abacus", "--out", str(tmp_path), "--seconds", "0"]) == 1
    report = json.loads((tmp_path / "gpu-abacus.json").read_text())
    assert report["failures"][0]["error"] == "there was no time left"


def test_a_process_that_breaks_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        gpu_bench.run_part({"part": "nothing"}, 60)


@pytest.mark.slow
def test_everything_runs_in_small(tmp_path: Path) -> None:
    gpu_bench.main(
        ["--name", "abacus", "--out", str(tmp_path), "--dry", "--parts", "limits", "ferrule", "transformers"]
    )
    report = json.loads((tmp_path / "gpu-abacus.json").read_text())
    assert report["failures"] == []
    assert report["models"]["tiny"]["ferrule"]["output_tokens_per_second"] > 0
    assert report["models"]["tiny"]["transformers"]["finished"] == DRY.requests
    assert set(PARTS) == {"limits", "kernels", "ferrule", "transformers"}
