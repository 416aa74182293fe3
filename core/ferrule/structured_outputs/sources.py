"""Types of the texts and schemas that a constraint is written in, with their bounds."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from ferrule.config.suffixes import split_backend
from ferrule.schema import SomeText, problem

MAX_SOURCE_BYTES = 64 << 10  # of a schema as JSON, a pattern, a grammar, all choices together
MAX_NESTING = 64  # of objects and lists in a schema, of groups in a pattern
MAX_CHOICES = 4096

_SCHEMA = "must be a JSON schema: an object, true or false, or the JSON text of one"
# What decides about groups of a pattern: an escaped character, a class, a bracket. Linear: no two forms begin alike.
_BRACKETS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL)


def plain_json(value: Any) -> Any:
    """Return the value of a JSON text, or a Python value as JSON has it, within the bounds. Raises the problem."""
    if isinstance(value, str):
        text = encoded(value)
    else:
        try:
            text = msgspec.json.encode(value)
        except RecursionError:
            raise problem(f"may be nested at most {MAX_NESTING} levels deep") from None
        except (TypeError, ValueError, OverflowError):
            raise problem("must hold nothing that JSON does not have") from None
        _check_size(len(text), " as JSON")
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise problem("is not valid JSON") from None
    except RecursionError:
        raise problem(f"may be nested at most {MAX_NESTING} levels deep") from None
    if _too_deep(found):
        raise problem(f"may be nested at most {MAX_NESTING} levels deep")
    return found


def encoded(text: str) -> bytes:
    """Return a text within the bounds, as UTF-8. Raises the problem."""
    _check_size(len(text))
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise problem("must be Unicode text, without lone surrogates") from None
    _check_size(len(data))
    return data


def _check_size(size: int, form: str = "") -> None:
    if size > MAX_SOURCE_BYTES:
        raise problem(f"may have at most {MAX_SOURCE_BYTES} bytes{form}")


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _schema(value: Any) -> dict[str, Any] | bool:
    if isinstance(value, type):
        value = _schema_of(value)
    if not isinstance(value, dict | bool | str):
        raise problem(_SCHEMA)
    found = plain_json(value)
    if not isinstance(found, dict | bool):
        raise problem(_SCHEMA)
    return found


def _schema_of(kind: type) -> dict[str, Any]:
    """Return the schema of a pydantic class, or of another class that pydantic can describe. Raises the problem."""
    try:
        return TypeAdapter(kind).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        raise problem("must be a class that pydantic can describe as a JSON schema") from None


def _written(text: str) -> str:
    encoded(text)
    if not text.strip():
        raise problem("must not be empty")
    return text


def _pattern(text: str) -> str:
    encoded(text)
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in ("(", ")"):
            depth += 1 if found[0] == "(" else -1
            deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise problem(f"may be nested at most {MAX_NESTING} levels deep")
    return text


def _choices(texts: list[str]) -> list[str]:
    encoded("".join(texts))
    return texts


def _backend(text: str) -> str:
    try:
        split_backend(text)
    except ValueError as error:
        raise problem(f"is not valid: {error}") from None
    return text


JsonSchema = Annotated[
    dict[str, Any] | bool, PlainValidator(_schema, json_schema_input_type=dict[str, Any] | bool | str)
]
Pattern = Annotated[SomeText, AfterValidator(_pattern)]
GrammarText = Annotated[SomeText, AfterValidator(_written)]
Choices = Annotated[
    list[SomeText],
    Field(strict=False, fail_fast=True, min_length=1, max_length=MAX_CHOICES),
    AfterValidator(_choices),
]
Backend = Annotated[SomeText, AfterValidator(_backend)]
