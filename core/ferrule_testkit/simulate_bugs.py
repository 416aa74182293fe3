"""Planted bugs: the simulator is trusted because it catches each of them.

Every bug is `DefaultScheduler` with one mistake of a kind that real schedulers have had. The names are those of the
`--bug` option of ``python -m ferrule_testkit.simulate``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ferrule.engine.scheduler import DefaultScheduler
from ferrule_testkit.simulate_bugs_cache import CACHE_BUGS
from ferrule_testkit.simulate_bugs_flow import FLOW_BUGS


def _dashed(name: str) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "-", name).lower()


BUGS: Mapping[str, type[DefaultScheduler]] = MappingProxyType(
    {_dashed(cls.__name__): cls for cls in (*CACHE_BUGS, *FLOW_BUGS)}
)
