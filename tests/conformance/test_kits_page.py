"""The example on the page about the kits runs under pytest, and every promise is a sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule.plugin import KINDS
from ferrule_testkit.kits import KVCacheKit, kit_of
from ferrule_testkit.kits.base import promises
from tools import ROOT

PAGE = ROOT / "docs" / "conformance.md"


@pytest.mark.parametrize("kind", [*KINDS, "kv_cache"])
def test_every_promise_is_a_sentence(kind: str) -> None:
    kit = KVCacheKit if kind == "kv_cache" else kit_of(kind)
    assert kit.__doc__
    for name, sentence in promises(kit):
        assert re.fullmatch(r"[A-Z`-].*\.", sentence), (name, sentence)


def test_the_example_runs_under_pytest_and_a_broken_plugin_fails_there(tmp_path: Path) -> None:
    """Run the example of this page with the plugin of docs/plugins.md, and with a fault in it."""
    example = re.search(r'title="test_shortest\.py"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    plugin = re.search(
        r'title="ferrule_shortest\.py"\n(.*?)^```', (ROOT / "docs/plugins.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert example is not None
    assert plugin is not None
    (tmp_path / "test_shortest.py").write_text(example[1])
    broken = plugin[1].replace(".id", ".id + 'x'")
    for source, chosen, status, said in ((plugin[1], "test", 0, "7 passed"), (broken, "victim", 1, "FAILED")):
        (tmp_path / "ferrule_shortest.py").write_text(source)
        options = ["-p", "no:cacheprovider", "-c", "/dev/null", "-k", chosen]
        command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == status, done.stdout
        assert said in done.stdout


def test_what_does_not_apply_is_skipped_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_console.py").write_text(
        "from ferrule_testkit.kits import StatLoggerKit\n"
        "from ferrule_plugins.stat_logger.console import Console\n"
        "class TestConsole(StatLoggerKit):\n    plugin = Console\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-rs", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed, 8 skipped" in done.stdout
    assert "it has no exposition" in done.stdout
