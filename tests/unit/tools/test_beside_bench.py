"""Two checkouts of Ferrule are compared in turns: here one with itself."""

from __future__ import annotations

import re
import sys

import pytest

from ferrule_contrib.tiny import path
from tools.benchmarks import beside


def test_both_compute_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["ferrule", str(path()), "--python", sys.executable, "--streams", "1,3", "--context", "20", "--steps", "4"]
    beside.main([*given, "--rounds", "2", "--quantization", "int8"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "threads: 1, 20 tokens of context; this Ferrule and ferrule, tokens/s"
    assert [line.removeprefix(str(path())).partition(":")[0] for line in lines[1:]] == [
        ", 1 streams",
        ", 3 streams",
        ", a prompt",
    ]
    assert all(re.search(r": [\d.]+, [\d.]+; ratio [\d.]+ \([\d.]+ to [\d.]+\)$", line) for line in lines[1:])


def test_a_program_that_ends_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    given = ["llama.cpp", str(path()), "--python", sys.executable, "--steps", "2", "--context", "8"]
    with pytest.raises(RuntimeError, match=r"llama\.cpp's process has ended: it may not take this model"):
        beside.main(given)
    assert "Error" in capfd.readouterr().err
