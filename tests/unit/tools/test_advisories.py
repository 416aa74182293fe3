"""Each published advisory has a test that names it, and the page says what the tests prove."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from tools import ROOT
from tools.pages.advisories import Proof, Row, page, proofs, proven, rows

NUMBERED = re.compile(r"CVE-\d{4}-\d{4,}|GHSA(-[0-9a-z]{4}){3}|PYSEC-\d{4}-\d+|GO-\d{4}-\d+|[a-z][a-z.-]*[a-z](-\d+)?")


def test_the_list_is_whole() -> None:
    """Count the list: leaving an entry out is a decision that this test has to state, too."""
    ids = [id for row in rows() for id in row.ids]
    assert len(ids) == len(set(ids)) == 258
    assert [id for id in ids if not NUMBERED.fullmatch(id)] == []


def test_every_advisory_is_named_by_a_test_that_always_runs() -> None:
    found = proven(rows(), proofs())
    assert [row.ids[0] for row, tests in found.items() if all(test.slow for test in tests)] == []


def test_what_is_absent_says_so() -> None:
    for row in rows():
        assert row.holds.endswith(".")
        assert not row.absent or re.fullmatch(r"not in this build: .+\.", row.absent), row


def test_every_mark_is_read() -> None:
    """Find marks on functions of modules, where the page finds them."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    written = sum(len(re.findall(r"^\s*@pytest\.mark\.advisory\(", file.read_text(), re.MULTILINE)) for file in files)
    own = sum(proof.path == "tests/unit/tools/test_advisories.py" for proof in proofs())
    assert len(proofs()) == written + own


def test_the_page_names_every_id_and_every_test() -> None:
    text = (ROOT / "docs" / "advisories.md").read_text()
    assert text == page()
    assert [id for row in rows() for id in row.ids if id not in text] == []
    assert [proof.function for proof in proofs() if f"`{proof.function}`" not in text] == []


def test_an_id_that_nobody_published_is_noticed() -> None:
    row = Row("s", ("CVE-1",), "w", "h.")
    assert proven([row], []) == {row: []}
    with pytest.raises(KeyError, match="CVE-2"):
        proven([row], [Proof("p", "f", ("CVE-2",), False)])


@pytest.mark.advisory("CVE-2025-69872")
def test_nothing_that_is_required_keeps_pickles() -> None:
    """Require, at any depth, no library whose files are pickles that others could write."""
    seen: set[str] = set()
    waiting = ["ferrule"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        own = [entry for entry in required if "extra ==" not in entry or name == "ferrule"]
        waiting += [re.split(r"[^A-Za-z0-9._-]", entry, maxsplit=1)[0].lower().replace("_", "-") for entry in own]
    assert {"torch", "xgrammar", "outlines-core"} <= seen
    assert not {"diskcache", "cloudpickle", "dill", "joblib"} & seen


@pytest.mark.advisory("CVE-2026-0599")
def test_there_are_no_workflows() -> None:
    """Have none: those that a hosted service runs for contributions would have to be checked for what they may
    inject.
    """
    assert not (ROOT / ".github").exists()
