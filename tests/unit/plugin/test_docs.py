"""`docs/plugins.md` is true: its examples are built, installed and loaded, its tables are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule.config.parse import parse
from ferrule.config.plugins import configured
from ferrule.env import Environment
from ferrule.hooks import open_hooks
from ferrule.interfaces.hooks import AccessRequest, Arrival, Hooks
from ferrule.interfaces.scheduler import RequestView
from ferrule.plugin import KINDS
from ferrule.sampling_params import SamplingParams
from tools import ROOT

PAGE = (ROOT / "docs" / "plugins.md").read_text()
EXAMPLES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def view(name: str, num_prompt: int) -> RequestView:
    return RequestView(
        id=name,
        arrival=0.0,
        sequence=num_prompt,
        priority=0,
        num_prompt=num_prompt,
        num_known=num_prompt,
        num_computed=0,
        num_preemptions=0,
    )


def test_the_example_package_installs_and_loads(site, tmp_path):
    source = tmp_path / "example"
    source.mkdir()
    for name in ("pyproject.toml", "ferrule_shortest.py"):
        (source / name).write_text(EXAMPLES[name])
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(site.folder)]
    subprocess.run([*pip, *offline, str(source)], check=True, capture_output=True)
    plugins = site.discover()
    assert plugins.origin("policy", "shortest") == "ferrule-shortest 0.1.0"
    policy = plugins.load("policy", "shortest")()
    short, long = view("short", 3), view("long", 30)
    assert sorted([long, short], key=lambda v: policy.key(v, 0.0)) == [short, long]
    assert policy.victim([long, short]) == "long"


def test_the_example_file_loads(site, tmp_path):
    file = tmp_path / "longest.py"
    file.write_text(EXAMPLES["longest.py"])
    plugins = site.discover(plugin=(f"policy={file}",))
    policy = plugins.load("policy", "longest")()
    short, long = view("short", 3), view("long", 30)
    assert sorted([short, long], key=lambda v: policy.key(v, 0.0)) == [long, short]


def test_the_example_with_options_gets_them(site, tmp_path):
    file = tmp_path / "grouped.py"
    file.write_text(EXAMPLES["grouped.py"])
    argv = ["--plugin", f"policy={file}", "--plugin-config", 'policy:grouped={"width": 10, "first": "long"}']
    plugins = configured(site.discover(), parse(argv, env=Environment()).config.plugins, Environment())
    policy = plugins.make("policy", "grouped")
    assert policy.key(view("short", 3), 0.0) > policy.key(view("long", 30), 0.0)
    assert policy.key(view("long", 30), 0.0)[0] == policy.key(view("as long", 39), 0.0)[0]
    assert plugins.options_of("policy", "grouped")[0].doc == "Tokens by which the prompts of a group may differ."


def test_the_example_hooks_work(site, tmp_path):
    file = tmp_path / "audit.py"
    file.write_text(EXAMPLES["audit.py"])
    hooks = open_hooks(site.discover(plugin=(f"hooks={file}",)))
    hooks.request_admitted("r1", "m", 5, SamplingParams(), Arrival(at=1.0, headers={}))
    assert hooks.authorise(AccessRequest("GET", "/v1/models", {"x-door": "back"})) is False
    assert hooks.authorise(AccessRequest("GET", "/v1/models", {})) is None
    assert hooks.failures == {}


def test_the_table_of_kinds_is_the_one_of_the_code():
    documented = {row[0].strip("`"): row[1:] for row in ROWS if len(row) == 3}
    prefix = "ferrule.interfaces."
    assert documented == {k.name: [f"`{k.base.removeprefix(prefix)}`", k.chosen_by] for k in KINDS.values()}


def test_the_table_of_hooks_is_the_one_of_the_code():
    documented = {row[0].strip("`") for row in ROWS if len(row) == 2}
    assert documented == {name for name in vars(Hooks) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_is_used(name):
    readers = Path(__file__), Path(__file__).parents[2] / "conformance" / "test_documented_router.py"
    assert any(f'"{name}"' in reader.read_text() for reader in readers)
