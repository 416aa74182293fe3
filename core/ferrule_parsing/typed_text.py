"""Values that are written as plain text, whose types a schema says."""

from __future__ import annotations

import json
from json.encoder import encode_basestring

from ferrule_parsing import argument_schemas
from ferrule_parsing.literals import json_of_literal


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return a value as JSON: the text itself where it is JSON, what Python would read, or the text as a string."""
    stripped = text.strip()
    kind = kind_of(stripped)
    if kind is not None and (not kinds or kind in kinds or (kind == "integer" and "number" in kinds)):
        return stripped
    if kinds and "string" not in kinds:
        literal = stripped if kind is not None else json_of_literal(stripped)
        if literal is not None:
            return literal
    return encode_basestring(text)


def kind_of(text: str) -> str | None:
    """Return the JSON type of a JSON text; None for anything else."""
    try:
        return argument_schemas.json_type(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)
