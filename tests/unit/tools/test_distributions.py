"""The distributions of the repository beside `ferrule`: what their pyproject.toml and the core state of them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from msgspec.structs import replace

from ferrule import __version__
from ferrule.errors import PluginError
from ferrule.extras import EXTRAS
from ferrule.launch.cli import main
from ferrule.plugin import Plugins, load_first
from ferrule.plugin.scan import Scan, scan
from tools import ROOT

OWN = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OTHERS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    for file in sorted(ROOT.glob("distributions/*/pyproject.toml"))
}


def test_an_extra_brings_each_distribution() -> None:
    assert OTHERS.keys() == {"ferrule-quantize", "ferrule-tensorizer", "ferrule-tgi"}
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


def test_messages_where_they_are_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferrule.plugin.plugin_set.scan", _bare)
    assert main(["quantize", "model"]) == main(["help", "quantize"]) == 2
    assert capsys.readouterr().err.count("pip install 'ferrule[quantize]'") == 2
    assert main(["serve", "--load-format", "tensorizer", "--dry-run"]) == 2
    assert "pip install 'ferrule[tensorizer]'" in capsys.readouterr().err
    for told in (lambda: Plugins().load("load_format", "tensorizer"), _automatic):
        with pytest.raises(PluginError, match=r"pip install 'ferrule\[tensorizer\]'"):
            told()


def _automatic() -> None:
    load_first(Plugins(), "load_format", (), lambda plugin: None)


def _bare() -> Scan:
    found = scan()
    return replace(found, refs=tuple(ref for ref in found.refs if ref.builtin))
