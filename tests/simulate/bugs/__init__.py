"""Planted bugs: the simulator is trusted because it catches each of them.

Every bug is `DefaultScheduler` with one mistake of a kind that real schedulers have had, or `FakeDevice` with one that
real runners have had. To watch one being caught:
``python -m ferrule_testkit.simulate --scheduler tests.simulate.bugs.cache:SkipDecref``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ferrule.engine.preparing import Preparing
from ferrule.engine.scheduler import DefaultScheduler
from ferrule_testkit.fakes import FakeDevice
from tests.simulate.bugs.adapters import ADAPTER_BUGS, PREPARING_BUGS
from tests.simulate.bugs.cache import CACHE_BUGS
from tests.simulate.bugs.drafts import DEVICE_BUGS, SCHEDULER_BUGS
from tests.simulate.bugs.flow import FLOW_BUGS
from tests.simulate.bugs.media import MEDIA_BUGS


def _dashed(name: str) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "-", name).lower()


BUGS: Mapping[str, type[DefaultScheduler]] = MappingProxyType(
    {_dashed(cls.__name__): cls for cls in (*CACHE_BUGS, *FLOW_BUGS, *SCHEDULER_BUGS, *ADAPTER_BUGS, *MEDIA_BUGS)}
)
BROKEN_DEVICES: Mapping[str, type[FakeDevice]] = MappingProxyType({_dashed(cls.__name__): cls for cls in DEVICE_BUGS})
PREPARING: Mapping[str, type[Preparing]] = MappingProxyType({_dashed(cls.__name__): cls for cls in PREPARING_BUGS})
"""Bugs in what requests wait for before they are queued; `simulate(…, preparing_cls=…)` has them caught."""
