"""The reference page of the HTTP API is current, and says all that the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import ROOT
from tools.pages.http import main, page, spec

PAGE = ROOT / "docs" / "reference" / "http.md"


def test_the_page_is_current() -> None:
    """If not: python -m tools.pages.http --write docs/reference/http.md"""
    assert PAGE.read_text(encoding="utf-8") == page(spec())


def test_every_route_type_and_field_is_there() -> None:
    document, text = spec(), PAGE.read_text(encoding="utf-8")
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"## {method.upper()} {path}\n" in text
    for name, schema in document["components"]["schemas"].items():
        assert f"### {name}\n" in text
        assert all(f"| `{field}`" in text for field in schema.get("properties", {}))


def test_every_reference_of_the_document_has_its_type() -> None:
    document = spec()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].rpartition("/")[2] in document["components"]["schemas"]
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(document)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path / "page.md")]) == 0
    assert main([]) == 0
    assert capsys.readouterr().out == (tmp_path / "page.md").read_text()
    assert main(["nonsense"]) == 2
