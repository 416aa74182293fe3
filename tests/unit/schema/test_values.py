"""Declared values: what is taken, how a refusal reads, what marks do, and what a hostile value costs."""

from __future__ import annotations

import decimal
import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, Tag, TypeAdapter, ValidationError

from ferrule.errors import RequestError
from ferrule.schema import (
    Arguments,
    Body,
    CacheSalt,
    Count,
    Int,
    Number,
    RequestId,
    SomeText,
    Strict,
    Text,
    TokenIds,
    by_type,
    check_marks,
    checked,
    known_names,
    no_effect,
    not_here,
    printable,
    problem,
    refusal_of,
    shaped,
)


def _even(value: int) -> int:
    if value % 2:
        raise problem("must be even")
    return value


class Item(Strict):
    name: SomeText
    size: Count | None = None


TextOrIds = Annotated[Annotated[Text, Tag("<a string>")] | Annotated[TokenIds, Tag("<a list>")], by_type]


class Thing(Body):
    count: Int | None = None
    share: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    flag: bool = False
    side: Literal["left", "right"] = "left"
    items: list[Item] | None = None
    one_or_many: TextOrIds | None = None
    id: RequestId | None = None
    even: Annotated[Int, AfterValidator(_even)] = 0
    raw: Annotated[list[dict[str, Any]], shaped(list[Item])] = []
    gone: Annotated[Any, not_here("flying", [])] = None
    idle: Annotated[Any, no_effect("nobody looks", False)] = None


class Options(Arguments):
    width: Count
    weight: Number = 1.0


def refusal(value: Any) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        Thing.model_validate(value)
    return refusal_of(caught.value, Thing)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"count": "5"}, "count must be an integer, not a string."),
        ({"count": True}, "count must be an integer, not a boolean."),
        ({"count": 5.5}, "count must be an integer, not a number."),
        ({"count": 2**63}, "count must be at most 9223372036854775807."),
        ({"count": math.nan}, "count must be an integer, not a number."),
        ({"share": "0.5"}, "share must be a number, not a string."),
        ({"share": 1}, "share must be less than 1."),
        ({"share": -0.1}, "share must be at least 0."),
        ({"share": math.nan}, "share must be a finite number."),
        ({"share": math.inf}, "share must be a finite number."),
        ({"share": 10**400}, "share must be a number, not an integer."),
        ({"flag": 1}, "flag must be true or false, not an integer."),
        ({"side": "lef"}, "side must be one of 'left', 'right'. Did you mean 'left'?"),
        ({"items": {}}, "items must be a list, not an object."),
        ({"items": [{"name": "a"}, 5]}, "items[1] must be an object, not an integer."),
        ({"items": [{}]}, "items[0].name is required."),
        ({"items": [{"name": ""}]}, "items[0].name must not be empty."),
        ({"items": [{"name": "a", "size": 0}]}, "items[0].size must be at least 1."),
        ({"one_or_many": 5}, "one_or_many must be a string or a list, not an integer."),
        ({"one_or_many": [1, "a"]}, "one_or_many[1] must be an integer, not a string."),
        ({"id": "a b"}, "id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -."),
        ({"even": 3}, "even must be even."),
        ({"raw": [{"name": 5}]}, "raw[0].name must be a string, not an integer."),
        ([], "The body must be an object, not a list."),
    ],
)
def test_a_refusal_says_where_and_what_is_right(value: Any, message: str) -> None:
    error = refusal(value)
    assert error.message == message
    assert (error.param or "The body") == message.split(" must ")[0].split(" is ")[0]


def test_what_is_taken() -> None:
    assert Thing.model_validate({"count": 5.0}).count == 5
    assert type(Thing.model_validate({"count": -3.0}).count) is int
    assert Thing.model_validate({"share": 0}).share == 0.0
    assert Thing.model_validate({"one_or_many": (1, 2)}).one_or_many == [1, 2]
    nothing = Thing.model_validate(dict.fromkeys(Thing.model_fields))
    assert (nothing, nothing.model_fields_set) == (Thing(), set())
    with pytest.raises(ValidationError):
        nothing.count = 5


def test_shaped_values_stay_as_they_came() -> None:
    given = [{"size": 1, "other": {"x": None}, "name": "a"}]
    assert Thing.model_validate({"raw": given}).raw is given


def test_marks() -> None:
    for body in ({}, {"gone": None}, {"gone": []}, {"idle": False}):
        assert check_marks(Thing.model_validate(body)) == []
    assert check_marks(Thing.model_validate({"idle": 0})) == [("idle", "nobody looks.")]
    with pytest.raises(RequestError, match="flying") as caught:
        check_marks(Thing.model_validate({"gone": 1, "idle": 1}))
    assert caught.value.param == "gone"


def test_python_callers_get_request_errors() -> None:
    assert Options(width=2.0).width == 2
    for values, param in (({}, "width"), ({"width": 0}, "width"), ({"width": 1, "weigth": 2}, "weigth")):
        with pytest.raises(RequestError) as caught:
            Options(**values)
        assert caught.value.param == param
    assert "Did you mean 'weight'" in caught.value.message
    assert Options(width=1, weight=decimal.Decimal("0.5")).weight == 0.5  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="width"):
        Options(width=1).model_copy(update={"width": -1})


def test_a_value_goes_by_its_name() -> None:
    salts: TypeAdapter[str] = TypeAdapter(CacheSalt)
    assert checked(salts, "a b", "salt") == "a b"
    with pytest.raises(RequestError, match="salt must be 1 to 256 printable") as caught:
        checked(salts, "é", "salt")
    assert caught.value.param == "salt"
    items: TypeAdapter[Any] = TypeAdapter(list[Item])
    with pytest.raises(RequestError) as caught:
        checked(items, [{"name": "a"}, {}], "given")
    assert caught.value.param == "given[1].name"


def test_the_document_tells_what_is_taken() -> None:
    fields = Thing.model_json_schema()["properties"]
    assert fields["count"] == {
        "anyOf": [{"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"type": "null"}]
    }
    assert fields["share"]["anyOf"][0] == {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    assert fields["gone"] == {"enum": [None, []], "description": "Not in this build: flying."}
    assert fields["idle"] == {"description": "No effect: nobody looks."}
    assert fields["raw"]["anyOf"][0]["items"] == {"$ref": "#/$defs/Item"}
    assert {"name", "size", "share", "idle"} <= known_names(Thing)


@pytest.mark.parametrize(
    "value",
    [
        {"items": [5] * 300_000},
        {"one_or_many": ["a"] * 300_000},
        {"raw": [[]] * 300_000},
        {f"x{number}": number for number in range(10_000)} | {"count": "a"},
        {"__class__": 1, "model_fields": 2, "__dict__": {}, "count": []},
    ],
)
def test_a_hostile_value_has_one_problem(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Thing.model_validate(value)
    assert caught.value.error_count() == 1


def test_names_of_clients_are_made_fit_to_be_shown() -> None:
    assert printable("a\né" + "b" * 100) == "a??" + "b" * 61
