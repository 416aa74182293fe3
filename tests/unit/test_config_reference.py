"""The committed reference page is what the sections say."""

from __future__ import annotations

from pathlib import Path

from ferrule.config.parse import config_sections
from ferrule.config.reference import page
from ferrule.config.schema import Schema
from ferrule.env import VARIABLES, variable

_DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    """Run `python -m ferrule.config.reference > docs/reference/cli.md` when this fails."""
    assert (_DOCS / "reference" / "cli.md").read_text(encoding="utf-8") == page()


def test_every_option_and_variable_has_a_heading() -> None:
    headings = {line.removeprefix("### ") for line in page().splitlines() if line.startswith("### ")}
    flags = {spec.flag for spec in Schema(config_sections()).specs}
    assert headings == flags | {variable(entry.field) for entry in VARIABLES}
