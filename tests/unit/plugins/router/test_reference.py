"""The reference page of the HTTP API says all that the document says."""

from __future__ import annotations

from typing import Any

from tools import ROOT
from tools.pages.http import spec

PAGE = ROOT / "docs" / "reference" / "http.md"


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
