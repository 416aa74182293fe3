from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import CacheGroup
from ferrule_example import ExampleScheduler, seats
from ferrule_testkit.kits import SchedulerKit


class TestConformance(SchedulerKit):
    plugin = ExampleScheduler


def test_seats() -> None:
    groups = (CacheGroup("full", 16),)
    limits = SchedulerLimits(
        groups=groups, num_blocks=13, max_num_seqs=256, max_num_batched_tokens=64, max_model_len=64
    )
    assert seats(limits) == 3
