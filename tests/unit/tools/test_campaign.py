"""The campaign's table of goals: complete, and of tests and drivers that exist."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tools import ROOT
from tools.campaign.__main__ import Proof, prove, table
from tools.campaign.goals import GROUPS, Goal
from tools.campaign.soak import MIB, growth

GOALS = [goal for goals in GROUPS.values() for goal in goals]


def test_the_table_is_whole() -> None:
    """Count the goals: 20 of input, 12 of load, 16 of faults, 7 of leaks, 10 of keys, 8 of data."""
    assert [len(goals) for goals in GROUPS.values()] == [20, 12, 16, 7, 10, 8]
    assert len({goal.id for goal in GOALS}) == 73
    for goal in GOALS:
        assert bool(goal.quick) != bool(goal.waits_for), goal.id


def test_commands_are_of_tests_and_drivers_that_exist() -> None:
    for goal in GOALS:
        for program, *words in (*goal.quick, *goal.full):
            if program == "pytest":
                paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
                assert paths, goal.id
                assert all((ROOT / path).exists() for path in paths), (goal.id, paths)
            else:
                assert (ROOT / f"{program.replace('.', '/')}.py").is_file(), (goal.id, program)


def test_a_goal_is_proved_by_all_of_its_commands() -> None:
    good, bad = ("timeit", "-n", "1", "-r", "1", "print('fine')"), ("timeit", "-n", "1", "-r", "1", "1/0")
    assert prove(Goal("a", "", "", (good,)), quick=True).holds
    failed = prove(Goal("a", "", "", (good, bad)), quick=True)
    assert not failed.holds
    assert "ZeroDivisionError" in failed.figure
    assert not prove(Goal("a", "", "", (good,), (bad,)), quick=False).holds


def test_tests_that_were_skipped_prove_nothing(tmp_path: Path) -> None:
    tests = tmp_path / "test_one.py"
    tests.write_text("import pytest\n\ndef test_one():\n    pytest.skip('not here')\n", encoding="utf-8")
    proof = prove(Goal("a", "", "", (("pytest", "--rootdir", str(tmp_path), "--noconftest", str(tests)),)), quick=True)
    assert "1 skipped" in proof.figure
    assert not proof.holds


def test_the_page_says_what_was_found() -> None:
    found = {"G-H1": Proof(True, "3 | passed", 1.0, True, "2026-11-25"), "G-F1": Proof(False, "hangs", 2.0, False, "x")}
    page = table(found)
    assert "1 goals hold, 1 of them by the smaller version; 1 do not" in page
    assert "holds (smaller, 2026-11-25): 3 / passed |" in page
    assert "**missed** (x): hangs |" in page
    assert "waits for media in prompts" in page
    assert "not run" in page


@pytest.mark.parametrize(("rate", "step"), [(0, 0), (10 * MIB, 0), (0, 7 * MIB)])
def test_growth(rate: int, step: int) -> None:
    """Measure a process that grows evenly by `rate` bytes an hour, or by `step` at once after it was warm."""
    points = [(float(when), 100 * MIB + rate * when // 3600 + step * (when > 30)) for when in range(0, 120, 2)]
    grown, slope = growth(points, warm=24.0)
    assert slope == pytest.approx(rate, rel=0.01, abs=1)
    assert grown == pytest.approx(step + rate * 94 // 3600, rel=0.01, abs=1)


def test_the_page_of_the_documentation_is_one_of_a_campaign() -> None:
    """Write the page from the proofs, which are kept beside the campaign."""
    page = Path(ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    kept = Path(ROOT / "tools" / "campaign" / "proofs.json").read_bytes()
    assert page == table(msgspec.json.decode(kept, type=dict[str, Proof]))
