"""The simulator must catch every planted bug within 10,000 steps, or it is not to be trusted."""

import pytest

from ferrule_testkit.simulate import simulate
from tests.simulate.bugs import BROKEN_DEVICES, BUGS, PREPARING


def test_there_are_enough_bugs():
    assert len(BUGS) >= 40


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name):
    with pytest.raises(Exception) as caught:  # a check fails, or the scheduler trips over its own state
        simulate(1, 10_000, BUGS[name])
    assert "replay: python -m ferrule_testkit.simulate --seed 1" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", BROKEN_DEVICES)
def test_broken_device_is_caught(name):
    with pytest.raises(AssertionError):  # a fault that the device finds, or a violation
        simulate(1, 10_000, device_cls=BROKEN_DEVICES[name])


@pytest.mark.parametrize("name", PREPARING)
def test_bug_in_preparing_is_caught(name):
    with pytest.raises(AssertionError):
        simulate(1, 10_000, preparing_cls=PREPARING[name])
