"""Marks of fields that are documented and that this build does nothing with. One check reads them, for every body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ferrule.errors import RequestError


@dataclass(frozen=True)
class Mark:
    """A mark of a field that does not simply work.

    `refused`: the field would change the answer, so asking for it is an error; otherwise it is named in a warning.
    `harmless` are values that ask for nothing.
    """

    reason: str
    refused: bool
    harmless: tuple[Any, ...]

    def asks(self, value: Any) -> bool:
        """Return whether a value asks for the marked feature. 0 is not the same as false."""
        return value is not None and not any(type(value) is type(idle) and value == idle for idle in self.harmless)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        told = handler(schema)
        if self.refused:
            told |= {"enum": [None, *self.harmless]} if self.harmless else {"type": "null"}
        effect = "Not in this build" if self.refused else "No effect"
        return {**told, "description": f"{effect}: {self.reason}."}


def not_here(feature: str, *harmless: Any) -> Mark:
    """Mark a field whose feature this build does not have."""
    return Mark(feature, True, harmless)


def no_effect(reason: str, *harmless: Any) -> Mark:
    """Mark a field that is known and changes nothing here."""
    return Mark(reason, False, harmless)


@lru_cache(maxsize=256)
def marks_of(model: type[BaseModel]) -> Mapping[str, Mark]:
    """Return the marks of a model's fields, by name."""
    found = {}
    for name, field in model.model_fields.items():
        for item in field.metadata:
            if isinstance(item, Mark):
                found[name] = item
    return found


def check_marks(body: BaseModel) -> list[tuple[str, str]]:
    """Return (field, reason) of each given field that has no effect. Raises RequestError for a field whose feature is
    missing.
    """
    given = body.model_fields_set
    marks = marks_of(type(body)).items()
    asked = [(name, mark) for name, mark in marks if name in given and mark.asks(getattr(body, name))]
    for name, mark in asked:
        if mark.refused:
            raise RequestError(f"{name}: not in this build: {mark.reason}.", name)
    return [(name, f"{mark.reason}.") for name, mark in asked]
