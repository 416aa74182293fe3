"""The benchmark of the kernels, tried on whatever is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ferrule_kernels.cuda
from ferrule_kernels.cuda import machine
from ferrule_kernels.cuda.cases import Case
from tools.benchmarks import cuda_kernels as bench

LIMITS = machine.Limits("device", copy_bytes=100.0, half="bfloat16", half_flops=1000.0, fp8_flops=2000.0)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(module: str, device: torch.device) -> Iterator[Case]:
        if module == "broken":
            raise RuntimeError("no such kernel")
        yield Case("copy", lambda: None, bytes=50)
        yield Case("fp8_product", lambda: None, bytes=10, flops=4000)
        yield Case("fails", lambda: 1 // 0, bytes=1)

    monkeypatch.setattr(bench, "modules", lambda: ["broken", "good"])
    monkeypatch.setattr(bench, "_cases", of)
    monkeypatch.setattr(bench, "seconds", lambda run, device: (run(), 4.0)[1])


@pytest.mark.usefixtures("cases")
def test_rates_are_beside_the_limit_and_a_failure_stops_nothing() -> None:
    broken, copy, product, fails = bench.run((), torch.device("cpu"), LIMITS)
    assert broken.error == "RuntimeError: no such kernel"
    assert (copy.bytes_per_second, copy.limit_share) == (12.5, 0.125)
    assert (product.flops_per_second, product.limit_share) == (1000.0, 0.5)  # at the rate of fp8
    assert fails.error is not None
    assert "12.5 % of the limit" in bench.line(copy)
    assert "failed: ZeroDivisionError" in bench.line(fails)


@pytest.mark.usefixtures("cases")
def test_names_select() -> None:
    found = [result.name for result in bench.run(("fp8",), torch.device("cpu"), LIMITS) if result.error is None]
    assert found == ["fp8_product"]
    assert len([*bench.run(("good",), torch.device("cpu"), LIMITS)]) == 4


@pytest.mark.usefixtures("cases")
def test_the_command_writes_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda device, *, small: LIMITS)
    monkeypatch.setattr(ferrule_kernels.cuda, "available", lambda: None)
    file = tmp_path / "kernels.json"
    assert bench.main(["--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert report["limits"]["copy_bytes"] == 100.0
    assert [result["name"] for result in report["results"]] == ["cases", "copy", "fp8_product", "fails"]


def test_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ferrule_kernels.cuda, "available", lambda: "there is no device")
    assert bench.main([]) == 2
    assert "there is no device" in capsys.readouterr().err


def test_the_machine_has_limits(device: torch.device) -> None:
    limits = machine.measure(device, small=True)
    assert limits.copy_bytes > 0
    assert limits.half_flops > 0
    assert limits.seconds(int(limits.copy_bytes), 0) == pytest.approx(1.0, rel=1e-6)


def test_kernels_are_available_under_the_interpreter() -> None:
    assert ferrule_kernels.cuda.available() is None
