"""Broken distributions of every sort: one clear line each, a refusal when chosen, and no harm to anything else."""

from __future__ import annotations

import time

import pytest

from ferrule.errors import PluginError
from ferrule.plugin import Plugins
from ferrule_plugins.command import plugin_probe
from ferrule_plugins.command.plugins import PluginsCommand
from tests.fakes.bad_wheels import Bad, bad_distributions, install_bad
from tools.wheels import Distribution

BAD = list(bad_distributions())


def without_strangers(plugins: Plugins) -> list[str]:
    return [ref.id for ref in plugins.refs if ref.builtin]


@pytest.mark.parametrize("bad", BAD, ids=[repr(bad.name[:20]) for bad in BAD])
def test_each_is_one_line_and_a_refusal(site, capsys, monkeypatch, bad: Bad):
    monkeypatch.setattr(plugin_probe, "_TIMEOUT", 1.0 if bad.name == "hangs" else 240.0)
    bad.install(site.folder)
    plugins = site.discover()
    PluginsCommand().run(["list", "policy"], plugins)
    shown = capsys.readouterr()
    lines = (shown.out + shown.err).splitlines()
    if bad.listed:
        assert [line for line in lines if bad.listed in line] != []
    assert all(line.isprintable() and len(line) < 300 for line in lines)
    if bad.usable:
        assert plugins.load("policy", bad.name)
    elif bad.told:
        assert PluginsCommand().run(["why", f"policy:{bad.name}"], plugins) == 1
        assert bad.told in capsys.readouterr().out
        if bad.name != "hangs":
            with pytest.raises(PluginError, match=f"policy:{bad.name} of {bad.name}-dist 1.0"):
                plugins.load("policy", bad.name)
    elif bad.name != "stale":
        with pytest.raises(PluginError, match="There is no policy plugin"):
            plugins.load("policy", bad.name)


def test_all_of_them_change_nothing_for_other_choices(site):
    before = site.discover()
    install_bad(site.folder)
    after = site.discover()
    assert without_strangers(after) == without_strangers(before)
    for kind in ("policy", "scheduler", "router", "command"):
        for name in before.names(kind):
            assert after.load(kind, name) is before.load(kind, name)
    done = site.python("-m", "ferrule", "version")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_an_import_prints_is_in_no_answer(site, capsys):
    install_bad(site.folder)
    status = PluginsCommand().run(["why", "policy:prints", "--json"], site.discover())
    assert status == 0
    assert "noise" not in capsys.readouterr().out


def test_the_cost_of_a_walk_over_two_hundred_distributions(site, record_property):
    """Record the time, which should be under 100 ms, without comparing it: on a busy machine it means nothing."""
    for number in range(200):
        points = {"ferrule.v1.policy": {f"p{number}": f"m{number}:P"}} if number % 20 == 0 else {}
        site.install(Distribution(name=f"many-{number}", entry_points={"console_scripts": {"x": "y:z"}, **points}))
    site.discover()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        found = site.discover()
        seconds.append(time.perf_counter() - start)
    assert sum(ref.distribution.startswith("many-") for ref in found.refs) == 10
    record_property("discovery_ms", round(min(seconds) * 1000, 1))
    print(f"discovery with 200 more distributions: {min(seconds) * 1000:.1f} ms")
