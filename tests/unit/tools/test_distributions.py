"""The distributions of the repository beside `ferrule`: what their pyproject.toml and the core state of them."""

from __future__ import annotations

import tomllib
from typing import Any

from ferrule import __version__
from ferrule.plugin.extras import EXTRAS
from tools import ROOT

OWN = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OTHERS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    for file in sorted(ROOT.glob("distributions/*/pyproject.toml"))
}


def test_an_extra_brings_each_distribution() -> None:
    assert OTHERS.keys() == {"ferrule-quantize", "ferrule-tensorizer"}
    for name, project in OTHERS.items():
        assert project["name"] == name
        assert project["version"] == __version__
        assert OWN["optional-dependencies"][name.removeprefix("ferrule-")] == [name]


def test_whoever_lacks_a_plugin_is_told_the_extra() -> None:
    offered = {
        f"{group.rpartition('.')[2]}:{plugin}": name.removeprefix("ferrule-")
        for name, project in OTHERS.items()
        for group, plugins in project["entry-points"].items()
        for plugin in plugins
    }
    assert dict(EXTRAS) == offered
