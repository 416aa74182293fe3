"""The pages about plugins are true: the output on them is what commands print, and references are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ferrule.plugin import KINDS
from ferrule_testkit.public import Shown
from tools import ROOT
from tools.contract import shown
from tools.pages.console import WORLDS, World, main, renew, renewed
from tools.pages.kinds import main as write_pages
from tools.pages.kinds import pages

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", WORLDS)
def test_the_output_on_a_page_is_what_its_commands_print(name: str) -> None:
    """Run `python -m tools.pages.console docs/PAGE` when this fails, and read what it changed."""
    assert renew(DOCS / name) == (DOCS / name).read_text(encoding="utf-8")


def test_the_pages_of_the_kinds_are_up_to_date() -> None:
    """Run `python -m tools.pages.kinds docs/reference/plugins templates/plugin` when this fails."""
    found = {file.stem: file.read_text(encoding="utf-8") for file in (DOCS / "reference" / "plugins").glob("*.md")}
    assert found == pages(ROOT / "templates" / "plugin")


def test_every_kind_has_a_page_with_all_of_its_methods() -> None:
    written = pages(ROOT / "templates" / "plugin")
    assert set(written) == {*KINDS, *(module.__name__.replace(".", "_") for module in shown(Shown.PARTS))}
    for kind in KINDS.values():
        base = kind.load_base()
        headings = set(re.findall(r"^### (\w+)$", written[kind.name], re.MULTILINE))
        assert {name for name in vars(base) if not name.startswith("_") and callable(getattr(base, name))} <= headings
        required = written[kind.name].count("*To be defined.")
        assert required == len(getattr(base, "__abstractmethods__", ()))
    assert "### BuildContext" in written["model"]  # the constructor's, which only the words mention
    assert "### RequestView" in written["policy"]
    assert "### AttentionBackend" not in written["model"]


# ---------------------------------------------------------------------------------------- the tools themselves


def test_a_page_is_renewed_block_by_block(tmp_path: Path) -> None:
    page = (
        'Text.\n\n```sh title="sub/say.sh"\necho "$1: $(pwd)"; echo "takes 3.14 s" >&2\n```\n\n'
        "```console\n$ mkdir there\n$ cd there\n$ sh ../sub/say.sh hello  # a remark\nstale\n```\n\n"
        "```python\n$ no\n```\n"
    )
    new = renewed(page, World(tmp_path))
    assert new == page.replace("stale\n", "hello: /home/me/there\ntakes 0.10 s\n")
    assert renewed(new, World(tmp_path / "again")) == new


def test_only_known_pages_are_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main([str(tmp_path / "x.md")]) == 2
    assert write_pages([]) == 2
    assert "usage" in capsys.readouterr().err
    assert write_pages([str(tmp_path / "new"), str(ROOT / "templates" / "plugin")]) == 0
    assert (tmp_path / "new" / "policy.md").read_text().startswith("# `policy`")
