"""Names of fields: those that a model declares, and a client's own in a form fit to be shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter


@lru_cache(maxsize=256)
def known_names(model: Any) -> frozenset[str]:
    """Return all field names of a model or a union of models, at any depth, as suggestions for a misspelt one."""
    return frozenset(_names(TypeAdapter(model).json_schema()))


def _names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        for part in schema.values():
            yield from _names(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _names(part)


def printable(name: str, length: int = 64) -> str:
    """Return a client's text, made fit for an error, a log line or a header."""
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in name[:length])
