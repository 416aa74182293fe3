"""Types of fields. They are strict: a value of another type is not converted, except a float such as 5.0 to an
integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

INT_MAX = (1 << 63) - 1
INT_MIN = -(1 << 63)

RULE = "rule"  # type of the problems that are worded here


def problem(must: str, field: str = "") -> PydanticCustomError:
    """Make an error for a validator to raise. `must` continues the path: "must be …". `field`: the field at fault, of
    an object.
    """
    return PydanticCustomError(RULE, "{must}", {"must": must, "field": field})


@dataclass(frozen=True)
class rule:
    """An annotation of a type whose own refusal says too little: `must` is said instead, behind the path."""

    must: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source),
            custom_error_type=RULE,
            custom_error_message="{must}",
            custom_error_context={"must": self.must, "field": ""},
        )


# ------------------------------------------------------------------------------------------------ numbers


def _integral(value: Any) -> Any:
    """Turn a float such as 5.0 into an integer, as clients in languages without integers send it."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= INT_MAX else value


_WHOLE = BeforeValidator(_integral)

# Bounds stand before the validator: behind it the OpenAPI document would not have them.
Int = Annotated[int, Field(strict=True, ge=INT_MIN, le=INT_MAX), _WHOLE]
Size = Annotated[int, Field(strict=True, ge=0, le=INT_MAX), _WHOLE]
Count = Annotated[int, Field(strict=True, ge=1, le=INT_MAX), _WHOLE]
SizeOrAll = Annotated[int, Field(strict=True, ge=-1, le=INT_MAX), _WHOLE]  # -1: as many as there are
Priority = Annotated[int, Field(strict=True, ge=-(1 << 31), le=(1 << 31) - 1), _WHOLE]

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=3.6e6)]

# There may be half a million of them, and the gate compares each with the vocabulary anyway: bounds are only told.
TokenId = Annotated[int, Field(strict=True, json_schema_extra={"minimum": 0, "maximum": INT_MAX})]
TokenIds = Annotated[list[TokenId], Field(strict=False, fail_fast=True)]  # not strict: a tuple will do, too


# ------------------------------------------------------------------------------------------------ texts


Text = Annotated[str, Field(strict=True)]
SomeText = Annotated[str, Field(strict=True, min_length=1)]
_REQUEST_ID = "[A-Za-z0-9._:-]{1,128}"
REQUEST_ID = re.compile(_REQUEST_ID)  # for headers; to be used with `fullmatch`
RequestId = Annotated[
    str, Field(strict=True, pattern=f"^{_REQUEST_ID}$"), rule("must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
]
CacheSalt = Annotated[
    str, Field(strict=True, pattern="^[ -~]{1,256}$"), rule("must be 1 to 256 printable ASCII characters")
]


# ------------------------------------------------------------------------------------------------ alternatives

_TAGS = {
    str: "<a string>",
    list: "<a list>",
    tuple: "<a list>",
    dict: "<an object>",
    int: "<an integer>",
    bool: "<true or false>",
}


def _tag(value: Any) -> str:
    return _TAGS.get(type(value), "")  # no member's: the refusal lists theirs


# Of a union whose members carry Tag("<a string>"), Tag("<a list>"), …: a value's type decides which of them it must be,
# so that a refusal is about that one and not about all. Tags are worded for refusals; paths leave out what is in angle
# brackets.
by_type = Discriminator(_tag)


@dataclass(frozen=True)
class by_field:
    """An annotation of a union of objects whose members carry Tag("<value>"): the text in the field `name` decides
    which one a value must be.

    `values` are all texts that the field may have.
    """

    name: str
    values: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        must = f"must be one of {', '.join(map(repr, self.values))}"
        decides = Discriminator(
            self._tag,
            custom_error_type=RULE,
            custom_error_message="{must}",
            custom_error_context={"must": must, "field": self.name},
        )
        return decides.__get_pydantic_core_schema__(source, handler)

    def _tag(self, value: Any) -> str:
        if not isinstance(value, dict):
            return f"<{self.values[0]}>"  # any member says that it must be an object
        found = value.get(self.name)
        return f"<{found}>" if isinstance(found, str) and found in self.values else ""


@dataclass(frozen=True)
class shaped:
    """An annotation of a value that must be a valid `kind` and stays as it came, key order and all: templates show it
    to models.
    """

    kind: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(_keep, handler.generate_schema(self.kind))


def _keep(value: Any, check: Callable[[Any], Any]) -> Any:
    check(value)
    return value
