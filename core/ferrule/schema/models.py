"""Bases of models: `Body` for JSON bodies, `Arguments` for values that Python callers build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from ferrule.schema.refusal import refusal_of
from ferrule.schema.undeclared import tell_undeclared


def _fail_fast(part: Any) -> None:
    if isinstance(part, dict):
        if part.get("type") in ("list", "tuple", "set", "frozenset"):
            part["fail_fast"] = True
        for value in part.values():
            _fail_fast(value)
    elif isinstance(part, list):
        for value in part:
            _fail_fast(value)


class Strict(BaseModel):
    """A model that takes no value of another type, and that never changes. Lists end at their first wrong item.

    Fields that it does not declare are treated as its `extra` says; those that it ignores, which is the default, are
    told to the client, or refused by a strict server (`Undeclared`).
    """

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, dict) and cls.model_config.get("extra", "ignore") == "ignore":
            tell_undeclared(value, _declared(cls))
        return cls._prepare(value)

    @classmethod
    def _prepare(cls, value: Any) -> Any:
        """Return the value that is validated for one that was given."""
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make validation stop at the first wrong item of a list: a million wrong items are one error, not a
        million.
        """
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema without titles, and without defaults: descriptions state defaults, for a model's own may
        hold instead.
        """
        told = handler.resolve_ref_schema(handler(schema))
        for field in told.get("properties", {}).values():
            field.pop("title", None)
            field.pop("default", None)
        return told


class Body(Strict):
    """A JSON object from a client. null means the same as an absent field.

    In a union of bodies a discriminator decides which it is: every member that is tried tells what it leaves out.
    """

    @classmethod
    def _prepare(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        told = super().__get_pydantic_json_schema__(schema, handler)
        for name, field in told.get("properties", {}).items():
            if name not in told.get("required", ()):
                told["properties"][name] = _or_null(field)
        return told


@lru_cache(maxsize=256)
def _declared(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    kinds = field.get("anyOf", [])
    if not field.keys() - {"description"} or {"type": "null"} in [field, *kinds] or None in field.get("enum", ()):
        return field
    if field.get("type") == "null":
        return field
    rest = {name: value for name, value in field.items() if name != "description"}
    told = {"anyOf": [*(kinds or [rest]), {"type": "null"}]}
    return told | ({"description": field["description"]} if "description" in field else {})


class Arguments(Strict):
    """An object that a Python caller builds by keywords. A wrong or unknown one is a RequestError that names it."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Wrap all validators of the model, those of its subclasses and other bases too, to raise RequestError."""

        def refuse(value: Any, check: Callable[[Any], Any]) -> Any:
            try:
                return check(value)
            except ValidationError as error:
                raise refusal_of(error, cls) from None

        return core_schema.no_info_wrap_validator_function(
            refuse, super().__get_pydantic_core_schema__(source, handler)
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, with changes that are checked like the rest. Raises RequestError."""
        given = {type(self).model_fields[name].alias or name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **(update or {})})
