"""Random work on the built-in scheduler and policies: all invariants, at every depth."""

import pytest

from ferrule_testkit.simulate import main, simulate
from tests.shared import grid, some


@pytest.mark.advisory("GHSA-v97p-wpxp-px84")
@pytest.mark.parametrize("seed", some(range(6)))
def test_mixed_work_keeps_every_invariant(seed):
    report = simulate(seed, 6000)
    assert report.requests > 100
    assert report.cached_tokens > 0
    assert report.preemptions > 0
    assert report.encoded > 20
    assert min(report.right_guesses, report.wrong_guesses) > 20


# The kits of policies and schedulers go through the depths, too.
@grid({"policy": ("fcfs", "priority", "priority_ageing", "chaos"), "depth": (3, 2, 1)})
def test_each_policy_at_each_depth(policy, depth):
    assert simulate(100 + depth, 1500, policy=policy, depth=depth).requests > 50


def test_same_arguments_give_the_same_run():
    first = simulate(5, 900)
    assert simulate(5, 900) == first
    assert simulate(6, 900) != first


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_long_runs(seed):
    simulate(seed, 100_000)


def test_the_command_reports_a_run(capsys):
    assert main(["--seed", "3", "--steps", "500"]) == 0
    assert "seed 3: Report(steps=500" in capsys.readouterr().out


def test_the_command_prints_a_line_that_replays_a_failure(capsys):
    assert main(["--seed", "1", "--steps", "10000", "--scheduler", "tests.simulate.bugs.cache:SkipDecref"]) == 1
    assert "replay: python -m ferrule_testkit.simulate --seed 1 --steps 10000" in capsys.readouterr().err
