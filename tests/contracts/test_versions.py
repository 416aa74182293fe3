"""Two versions of the contract at once, with an invented version 2, in which a policy ranks requests by one number."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType, ModuleType

import msgspec
import pytest
from msgspec.structs import replace

from ferrule.errors import PluginError
from ferrule.interfaces.scheduler import RequestView, SchedulingPolicy
from ferrule.plugin import KINDS, Plugins, State, load
from ferrule.plugin.kinds import Earlier
from tools.wheels import Distribution

OLD = """
from ferrule.interfaces.scheduler import SchedulingPolicy

class Newest(SchedulingPolicy):
    def key(self, view, now):
        return (-view.sequence,)

    def victim(self, running):
        return running[0].id
"""
NEW = """
from contract_two import Ranking

class Oldest(Ranking):
    def rank(self, view):
        return -view.sequence

    def victims(self, running):
        return [view.id for view in running]
"""


class Ranking(ABC):
    """The invented base class of version 2."""

    @abstractmethod
    def rank(self, view: RequestView) -> float:
        """Return the rank of a request: of those that wait, the highest runs first."""

    @abstractmethod
    def victims(self, running: Sequence[RequestView]) -> list[str]:
        """Return the requests to preempt, the first one first."""


def rank_by_key(old: type[SchedulingPolicy]) -> type[Ranking]:
    """Adapt a class of version 1 to version 2."""

    class Adapted(Ranking):
        def __init__(self) -> None:
            self._policy = old()

        def rank(self, view: RequestView) -> float:
            return -self._policy.key(view, 0.0)[0]

        def victims(self, running: Sequence[RequestView]) -> list[str]:
            return [self._policy.victim(running)]

    Adapted.__name__ = Adapted.__qualname__ = old.__name__
    return Adapted


def forgets_half(old: type[SchedulingPolicy]) -> type[Ranking]:
    class Half(Ranking):
        def rank(self, view: RequestView) -> float:
            return 0.0

    return Half


def raises(old: type[SchedulingPolicy]) -> type[Ranking]:
    raise ValueError("no such key")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Set up a Ferrule of contract 2, which reads 1 too. The returned module has its interfaces and adapters."""
    module = ModuleType("contract_two")
    vars(module).update(Ranking=Ranking, rank_by_key=rank_by_key, forgets_half=forgets_half, raises=raises)
    monkeypatch.setitem(sys.modules, "contract_two", module)
    earlier = Earlier("ferrule.interfaces.scheduler:SchedulingPolicy", "contract_two:rank_by_key")
    policy = KINDS["policy"]
    changed = replace(policy, base="contract_two:Ranking", earlier={1: earlier})
    kinds = MappingProxyType({**KINDS, "policy": changed})
    for name in [name for name in sys.modules if name.startswith("ferrule.plugin")]:
        for constant, value in {"CONTRACT": 2, "READABLE": frozenset({1, 2}), "KINDS": kinds}.items():
            if hasattr(sys.modules[name], constant):
                monkeypatch.setattr(f"{name}.{constant}", value)
    return module


def dist(name: str, version: int, source: str, entry: str = "mine") -> Distribution:
    module = name.replace("-", "_")
    cls = "Newest" if source == OLD else "Oldest"
    return Distribution(
        name=name,
        entry_points={f"ferrule.v{version}.policy": {entry: f"{module}:{cls}"}},
        files={f"{module}.py": source},
    )


def view(sequence: int) -> RequestView:
    return RequestView(
        id=f"r{sequence}",
        arrival=0.0,
        sequence=sequence,
        priority=0,
        num_prompt=5,
        num_known=5,
        num_computed=0,
        num_preemptions=0,
    )


def ranked(plugins: Plugins, name: str) -> list[int]:
    policy = plugins.load("policy", name)()
    assert isinstance(policy, Ranking)
    return [v.sequence for v in sorted([view(1), view(2), view(3)], key=policy.rank, reverse=True)]


def test_plugins_of_both_versions_are_chosen_by_name_and_do_what_they_say(two, site):
    site.install(dist("old-dist", 1, OLD, "newest"), dist("new-dist", 2, NEW, "oldest"))
    plugins = site.discover()
    assert {"newest", "oldest"} <= set(plugins.names("policy"))
    assert ranked(plugins, "newest") == [3, 2, 1]
    assert ranked(plugins, "oldest") == [1, 2, 3]
    assert plugins.load("policy", "newest")().victims([view(1), view(2)]) == ["r1"]


def test_built_in_plugins_of_kinds_that_did_not_change_need_no_adapter(two, site):
    """Load built-in plugins, which all say v1 here: a new version costs the kinds that it changes, and no other."""
    plugins = site.discover()
    assert plugins.load("attention", "torch_sdpa").__name__ == "TorchSDPA"
    assert ranked(plugins, "fcfs") == [1, 2, 3]


def test_a_package_that_serves_both_versions_counts_once_and_as_the_newer(two, site):
    site.install(
        Distribution(
            name="both-dist",
            entry_points={
                "ferrule.v1.policy": {"mine": "both_old:Newest"},
                "ferrule.v2.policy": {"mine": "both_new:Oldest"},
            },
            files={"both_old.py": OLD, "both_new.py": NEW},
        )
    )
    plugins = site.discover()
    assert ranked(plugins, "mine") == [1, 2, 3]
    assert {ref.contract: plugins.verdict(ref).state for ref in plugins.offers("policy", "mine")} == {
        1: State.PASSED_OVER,
        2: State.AVAILABLE,
    }


def test_two_packages_conflict_whatever_their_versions(two, site):
    site.install(dist("old-dist", 1, OLD), dist("new-dist", 2, NEW))
    with pytest.raises(PluginError, match="also offered by"):
        site.discover().load("policy", "mine")


@pytest.mark.parametrize(
    ("source", "cls", "reason"),
    [
        (NEW, "Oldest", "does not derive from ferrule.interfaces.scheduler.SchedulingPolicy"),
        (OLD.replace("def victim", "def other"), "Newest", "lacks victim of ferrule.interfaces.scheduler"),
    ],
)
def test_an_old_plugin_that_does_not_fit_its_own_contract_is_refused(two, site, source, cls, reason):
    entry = {"ferrule.v1.policy": {"mine": f"odd_module:{cls}"}}
    site.install(Distribution(name="odd-dist", entry_points=entry, files={"odd_module.py": source}))
    with pytest.raises(PluginError, match=reason):
        site.discover().load("policy", "mine")


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ("forgets_half", "lacks victims of .*Ranking"),
        ("raises", "ValueError: no such key"),
        ("gone", "has no attribute"),
    ],
)
def test_an_adapter_that_fails_is_told_like_a_plugin_that_does(two, site, monkeypatch, adapter, reason):
    earlier = load.KINDS["policy"].earlier
    monkeypatch.setitem(earlier, 1, Earlier(earlier[1].base, f"contract_two:{adapter}"))
    site.install(dist("old-dist", 1, OLD, "newest"))
    with pytest.raises(PluginError, match=f"old-dist.*{reason}"):
        site.discover().load("policy", "newest")


def test_versions_before_the_previous_and_after_the_current_one_are_refused(two, site):
    site.install(dist("ancient-dist", 0, OLD, "ancient"), dist("future-dist", 3, OLD, "future"))
    plugins = site.discover()
    for name, state in (("ancient", State.OLDER), ("future", State.NEWER)):
        (ref,) = plugins.offers("policy", name)
        assert plugins.verdict(ref).state is state
        with pytest.raises(PluginError, match="this Ferrule reads v1 and v2"):
            plugins.load("policy", name)


def test_a_set_with_old_plugins_crosses_processes(two, site):
    site.install(dist("old-dist", 1, OLD, "newest"))
    plugins = msgspec.msgpack.decode(msgspec.msgpack.encode(site.discover()), type=Plugins)
    assert ranked(plugins, "newest") == [3, 2, 1]
