"""What Python callers say about the form of outputs: two classes of parameters, and `SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

import ferrule
from ferrule import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from ferrule.errors import RequestError
from ferrule.forms import Fixed, GrammarSpec, Json, OneOf, Regex, Rules, Triggered


class Car(BaseModel):
    brand: str


@dataclass
class Town:
    name: str


class Callback:
    """A class that pydantic cannot describe."""


CLASSES = [GuidedDecodingParams, StructuredOutputsParams]
CAR = {"title": "Car", "type": "object", "properties": {"brand": {"title": "Brand", "type": "string"}}} | {
    "required": ["brand"]
}


@pytest.mark.parametrize("kind", CLASSES)
def test_each_way_of_saying_it(kind: Any) -> None:
    assert kind(json={"type": "object"}).spec() == GrammarSpec(form=Json({"type": "object"}))
    assert kind(json='{"type": "object"}').spec().form == Json({"type": "object"})
    assert kind(json=Car).spec().form == Json(CAR)
    assert kind(json=Car.model_json_schema()).spec().form == Json(CAR)
    assert kind(json=Town).spec().form.schema["required"] == ["name"]
    assert kind(regex="a+").spec().form == Regex("a+")
    assert kind(choice=("a", "b")).spec().form == OneOf((Fixed("a"), Fixed("b")))
    assert kind(grammar="start: A").spec().form == Rules("start: A")
    assert kind(json_object=True).spec().form == Json({"type": "object"})
    structures = [{"begin": "<f>", "schema": {}, "end": ""}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    assert isinstance(kind(structural_tag=tag).spec().form, Triggered)


@pytest.mark.parametrize("kind", CLASSES)
def test_options(kind: Any) -> None:
    own = {"whitespace_pattern": " ", "disable_any_whitespace": True, "disable_additional_properties": True}
    expected = GrammarSpec(form=Json({}), whitespace_pattern=" ", any_whitespace=False, additional_properties=False)
    assert kind(json={}, **own).spec() == expected


def test_the_backend() -> None:
    given = GuidedDecodingParams(json={}, backend="xgrammar:disable-any-whitespace", disable_fallback=True)
    expected = GrammarSpec(form=Json({}), backend="xgrammar", fallback=False, any_whitespace=False)
    assert given.spec() == expected
    assert not GuidedDecodingParams(json={}, backend="xgrammar:no-fallback").spec().fallback
    with pytest.raises(RequestError, match="backend"):
        StructuredOutputsParams(json={}, backend="xgrammar")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "json"),
        ({"json": {}, "regex": "a"}, "regex"),
        ({"json": 3}, "json"),
        ({"json": Callback}, "json"),
        ({"json": {"const": {1, 2}, "default": Callback()}}, "json"),
        ({"json": {"const": "\ud800"}}, "json"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", None]}, "choice[1]"),
        ({"grammar": ""}, "grammar"),
        ({"regx": "a"}, "regx"),
        ({"structural_tag": "{}"}, "structural_tag.format"),
    ],
)
def test_refusals_name_the_parameter(kind: Any, given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        kind(**given)
    assert caught.value.param == param


def test_a_schema_that_holds_itself() -> None:
    schema: dict[str, Any] = {}
    schema["not"] = schema
    with pytest.raises(RequestError, match="json may be nested at most 64 levels deep"):
        GuidedDecodingParams(json=schema)


def test_a_schema_that_changes_later_changes_nothing() -> None:
    schema = {"type": "object"}
    params = GuidedDecodingParams(json=schema)
    schema["type"] = "array"
    assert params.spec().form == Json({"type": "object"})


def test_sampling_params_carry_one() -> None:
    guided, structured = GuidedDecodingParams(regex="a", backend="outlines"), StructuredOutputsParams(json={})
    assert SamplingParams().grammar is None
    assert SamplingParams(guided_decoding=guided).grammar == GrammarSpec(form=Regex("a"), backend="outlines")
    assert SamplingParams(structured_outputs=structured).grammar == GrammarSpec(form=Json({}))
    with pytest.raises(RequestError) as caught:
        SamplingParams(guided_decoding=guided, structured_outputs=structured)
    assert caught.value.param == "guided_decoding"
    assert "structured_outputs" in caught.value.message


def test_copies_are_checked_like_the_rest() -> None:
    """Copy a field whose name is not that of its attribute under its own name."""
    params = StructuredOutputsParams(json={"type": "object"})
    assert params.model_copy().spec() == params.spec()
    assert params.model_copy(update={"disable_any_whitespace": True}).spec().any_whitespace is False
    tag = StructuredOutputsParams(structural_tag={"format": {"type": "any_text"}})  # type: ignore[arg-type]
    assert tag.model_copy().spec() == tag.spec()
    with pytest.raises(RequestError):
        params.model_copy(update={"regex": "a"})
    assert SamplingParams(structured_outputs=params).model_copy(update={"n": 2}).grammar == params.spec()


def test_the_package_exports_them() -> None:
    assert {"GuidedDecodingParams", "StructuredOutputsParams"} <= set(ferrule.__all__)
