"""Where a step's time goes, as the runner's benchmark shows it."""

from __future__ import annotations

import sys

import pytest

from ferrule_contrib.tiny import path
from tools.benchmarks import runner as runner_bench


def test_the_profile_of_a_step_and_of_a_prefill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["runner_bench", str(path()), "--rows", "1,3", "--context", "20", "--steps", "3", "--profile"]
    arguments += ["--beside", "8,16", "--kv-cache-dtype", "fp8"]
    monkeypatch.setattr(sys, "argv", arguments)
    runner_bench.main()
    shown = capsys.readouterr().out
    assert shown.count("decode step") == 2
    assert shown.count("tokens of a prompt") == 4
    for part in runner_bench.PARTS:
        assert shown.count(part) >= 4
    lines = [line.split() for line in shown.splitlines() if line.endswith("calls")]
    assert len(lines) == 4 * len(runner_bench.PARTS)
    assert sum(float(words[-3].rstrip("%")) for words in lines) == pytest.approx(400, abs=2.0)
    assert all(int(words[-2]) > 0 for words in lines)  # each part was seen: none has moved to where no clock is


def test_clocks_leave_no_trace() -> None:
    class Thing:
        def work(self) -> int:
            return 3

    before = Thing.work
    with runner_bench.clocks({"a": [(Thing, "work")]}) as found:
        assert Thing().work() + Thing().work() == 6
    assert Thing.work is before
    assert found["a"].calls == 2
