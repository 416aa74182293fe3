"""The pages about plugins are true: the output on them is what commands print, and references are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ferrule.plugin import KINDS
from ferrule_testkit.public import Shown
from tools import ROOT
from tools.contract import shown
from tools.pages.console import WORLDS, World, renew, renewed
from tools.pages.kinds import pages

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", WORLDS)
def test_the_output_on_a_page_is_what_its_commands_print(name: str) -> None:
    """Run `python -m tools.pages` when this fails, and read what it changed."""
    assert renew(DOCS / name) == (DOCS / name).read_text(encoding="utf-8")


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
