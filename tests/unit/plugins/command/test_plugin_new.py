"""`ferrule plugins new`: names, places and refusals. tests/e2e/plugins/test_templates.py proves what it writes."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ferrule.errors import ConfigError, PluginError
from ferrule.plugin import KINDS, Plugins, discover
from ferrule_plugins.command.plugin_new import Names
from ferrule_plugins.command.plugins import PluginsCommand
from tools import ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return discover()


def new(plugins: Plugins, *argv: str) -> int:
    return PluginsCommand().run(["new", *argv], plugins)


@pytest.mark.parametrize(
    ("name", "distribution", "module", "cls"),
    [
        ("short", "ferrule-short", "ferrule_short", "Short"),
        ("my_calls", "ferrule-my-calls", "ferrule_my_calls", "MyCalls"),
        ("My-Calls2", "ferrule-my-calls2", "ferrule_my_calls2", "MyCalls2"),
        ("MyNetForCausalLM", "ferrule-my-net-for-causal-lm", "ferrule_my_net_for_causal_lm", "MyNetForCausalLM"),
        ("ferrule-x", "ferrule-x", "ferrule_x", "FerruleX"),
        ("class", "ferrule-class", "ferrule_class", "Class"),
        ("X", "ferrule-x", "ferrule_x", "X"),
    ],
)
def test_one_name_in_four_spellings(name: str, distribution: str, module: str, cls: str) -> None:
    assert Names.of(name) == Names(entry=name, distribution=distribution, module=module, cls=cls)


@pytest.mark.parametrize(
    "name", ["a b", "1st", "-x", "x-", "x--y", "a.b", "../up", "a/b", "é", "x;y", "a=b", "x" * 65, "a\nb", " "]
)
def test_a_name_that_cannot_be_typed_imported_and_published_is_refused(plugins: Plugins, here: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        new(plugins, "policy", f"--name={name}")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("argv", "error", "told"),
    [
        ([], ConfigError, "kind is missing"),
        (["polcy", "x"], ConfigError, "Did you mean 'policy'"),
        (["policy"], ConfigError, "the name is missing"),
        (["policy", "x", "y"], ConfigError, "'y'"),
        (["policy", "fcfs"], PluginError, "offered by ferrule"),
        (["policy", "plugins"], PluginError, "ferrule_plugins is installed already"),
    ],
)
def test_what_cannot_be_written_is_told(
    plugins: Plugins, here: Path, argv: list[str], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        new(plugins, *argv)
    assert not list(here.iterdir())


def test_nothing_is_overwritten(plugins: Plugins, here: Path) -> None:
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("mine")
    (here / "file").write_text("mine")
    for place in ("full", "file", "file/below"):
        with pytest.raises(PluginError, match="full|file"):
            new(plugins, "policy", "x", "--dir", place)
    assert sorted(path.name for path in here.rglob("*")) == ["file", "full", "mine.txt"]
    (here / "empty").mkdir()
    assert new(plugins, "policy", "x", "--dir", "empty") == 0
    with pytest.raises(PluginError, match="exists already"):
        new(plugins, "policy", "x", "--dir", "empty")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_under_any_name(plugins: Plugins, here: Path, kind: str) -> None:
    """Write each kind also under names that the template's own words are made of."""
    for name in ("my-example", "none", kind.replace("_", "-"), "default", "ExampleThing"):
        if name in plugins.names(kind):
            continue
        assert new(plugins, kind, name, "--dir", f"{kind}-{name}") == 0
        folder = here / f"{kind}-{name}"
        code = next(folder.glob("src/*/__init__.py")).read_text()
        defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}
        project = (folder / "pyproject.toml").read_text()
        (line,) = [line for line in project.splitlines() if line.startswith(f"{name} = ")]
        module, _, cls = line.partition('"')[2].strip('"').partition(":")
        assert cls in defined
        assert (folder / "src" / module / "__init__.py").is_file()
        for file in folder.rglob("*.py"):
            ast.parse(file.read_text())
            assert not re.search(r"\bferrule_example\b|\bferrule-example\b", file.read_text())
        imported = {
            alias.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert cls not in imported


def test_help(plugins: Plugins, capsys: pytest.CaptureFixture[str]) -> None:
    assert new(plugins, "--help") == 0
    assert "--dir" in capsys.readouterr().out


def test_the_templates_are_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "ferrule"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.safetensors")
    for name in ("core", "plugins", "kernels", "contrib_models", "templates"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    environment = {**os.environ, "CC": "false", "CXX": "false"}  # kernels, which are optional, take minutes
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("ferrule-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    prefix = "ferrule_plugins/command/plugin_templates/"
    packed = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    templates = ROOT / "templates" / "plugin"
    tracked = {
        str(file.relative_to(templates))
        for file in templates.rglob("*")
        if file.suffix in {".py", ".toml", ".md"} and "build" not in file.parts
    }
    assert packed == tracked
    assert len(tracked) > 4 * len(KINDS)
    chat = {name.rpartition("/")[2] for name in names if name.startswith("ferrule/frontend/text/chat_templates/")}
    assert chat == {file.name for file in (ROOT / "templates" / "chat").iterdir()}
    assert len(chat) > 25
