"""The reference page of options has all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ferrule.config.schema import Schema
from ferrule.env import VARIABLES, variable
from ferrule_plugins.command.serve import sections
from tools.pages.cli import page


def test_every_option_and_variable_has_a_heading() -> None:
    headings = {line.removeprefix("### ") for line in page().splitlines() if line.startswith("### ")}
    flags = {spec.flag for spec in Schema(sections()).specs}
    assert headings == flags | {variable(entry.field) for entry in VARIABLES} | {"Variables of vLLM"}


def test_every_documented_variable_is_in_the_page() -> None:
    listed = (Path(__file__).parent / "data" / "documented_variables.txt").read_text().split()
    text = page()
    ours = {f"VLLM_{entry.field.upper()}" for entry in VARIABLES}
    assert [name for name in listed if f"`{name}`" not in text and name not in ours] == []


def test_the_classes_are_counted() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| [`--")]
    counts = Counter(row.split(" | ")[2] for row in rows)
    assert len(rows) == len(Schema(sections()).specs)
    for name, count in counts.items():
        assert f"| {name} | {count} |" in page()
