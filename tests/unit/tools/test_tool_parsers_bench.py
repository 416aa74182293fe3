"""The benchmark of tool parsers: its texts are nothing but calls."""

from __future__ import annotations

import pytest

from tools.benchmarks import tool_parsers


def test_every_call_of_the_text_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    tool_parsers.main(["--characters", "4096", "--rounds", "1", "hermes", "gemma4"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], int(row[1])) for row in rows] == [("hermes", 37), ("gemma4", 78)]
