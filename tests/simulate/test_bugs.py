"""The simulator must catch every planted bug within three runs of 10,000 steps, or it is not to be trusted."""

import pytest

from ferrule_testkit.simulate import simulate
from tests.simulate.bugs import BROKEN_DEVICES, BUGS, PREPARING

# Seeds that show a bug soon; without them the runs would take as long as those of forty other bugs.
EARLY = {"preempted-for-ever": 38, "long-prompts-not-counted": 5, "asks-behind-the-longest": 4}


def runs(name="", **broken):
    """Run several seeds: most bugs show in the first run, but the run is a matter of chance."""
    for seed in (EARLY.get(name, 1), 2, 3):
        simulate(seed, 10_000, **broken)


def test_there_are_enough_bugs():
    assert len(BUGS) >= 40


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name):
    # A check fails, or the scheduler trips over its own state; any other error would be a mistake in the bug itself.
    with pytest.raises((AssertionError, LookupError, RuntimeError)) as caught:
        runs(name, scheduler_cls=BUGS[name])
    assert "replay: python -m ferrule_testkit.simulate --seed" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", BROKEN_DEVICES)
def test_broken_device_is_caught(name):
    with pytest.raises(AssertionError):  # a fault that the device finds, or a violation
        runs(device_cls=BROKEN_DEVICES[name])


@pytest.mark.parametrize("name", PREPARING)
def test_bug_in_preparing_is_caught(name):
    with pytest.raises(AssertionError):
        runs(preparing_cls=PREPARING[name])
