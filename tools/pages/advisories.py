"""`docs/advisories.md`: what published advisories tell of, what holds here instead, and the tests that prove it.

The rows are those of tests/contracts/advisories.toml; the tests are those with `@pytest.mark.advisory(id)`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT

TABLE = Path("tests/contracts/advisories.toml")
_MARK = "pytest.mark.advisory"
_HEAD = """# Advisories

Servers like this one, and the libraries that they use, have published what went wrong in them. For each of those
advisories this page says what holds here instead, and names the tests that prove it. It is written from the tests:
`@pytest.mark.advisory("CVE-2025-24357")` on a test says what it proves, and a row without a test is an error.

Where an advisory is about a feature that is not in this build, the row says so, and its tests show what a caller or a
user is told who asks for it. Names that are not numbers of advisories stand for issues of those projects.

`python -m pytest -m advisory` runs them all.
"""


@dataclass(frozen=True)
class Row:
    """Advisories that one sentence answers."""

    section: str
    ids: tuple[str, ...]
    what: str
    holds: str
    absent: str = ""


@dataclass(frozen=True)
class Proof:
    """A test and the advisories that it names."""

    path: str
    function: str
    ids: tuple[str, ...]
    slow: bool


def rows(root: Path = ROOT) -> list[Row]:
    """Return the rows of the table, in its order."""
    content = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))
    return [Row(**{**entry, "ids": tuple(entry["ids"])}) for entry in content["advisory"]]


def proofs(root: Path = ROOT) -> list[Proof]:
    """Return every marked test, in the order of files and lines."""
    found: list[Proof] = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if _MARK in text:
            found += _of_file(file.relative_to(root).as_posix(), text)
    return found


def _of_file(path: str, text: str) -> Iterator[Proof]:
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        ids = [argument.value for call in _marks(node) for argument in call.args if isinstance(argument, ast.Constant)]
        if ids:
            slow = any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
            yield Proof(path, node.name, tuple(map(str, ids)), slow)


def _marks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Call]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == _MARK:
            yield decorator


def proven(table: Sequence[Row], marked: Sequence[Proof]) -> Mapping[Row, list[Proof]]:
    """Return the tests of each row. Raises KeyError for a mark with an id that no row has."""
    row_of = {id: row for row in table for id in row.ids}
    found: dict[Row, list[Proof]] = {row: [] for row in table}
    for proof in marked:
        for row in dict.fromkeys(row_of[id] for id in proof.ids):
            found[row].append(proof)
    return found


def page(root: Path = ROOT) -> str:
    """Return the text of the page."""
    lines, section = [_HEAD], ""
    for row, tests in proven(rows(root), proofs(root)).items():
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| advisory | what holds here | tests |", "|---|---|---|"]
        told = f"{row.absent[0].upper()}{row.absent[1:]} {row.holds}" if row.absent else row.holds
        names = "<br>".join(f"`{test.path.removeprefix('tests/')}` `{test.function}`" for test in tests)
        lines.append(f"| {row.what}<br>{', '.join(row.ids)} | {told} | {names} |")
    return "\n".join(lines) + "\n"
