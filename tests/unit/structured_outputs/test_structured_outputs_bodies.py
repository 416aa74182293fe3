"""From bodies of chat and completions to the constraint that the service is given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from ferrule.errors import RequestError
from ferrule.forms import (
    Anything,
    Fixed,
    Form,
    GrammarSpec,
    Json,
    OneOf,
    Regex,
    Repeated,
    Rules,
    Series,
    Tag,
    Triggered,
    Until,
)
from tests.fakes.http import Site, error_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def site() -> Site:
    return Site()


async def constraint(site: Site, **body: Any) -> GrammarSpec | None:
    """Return the constraint that both routes give to the service, which must be the same."""
    for call in (site.complete, site.chat):
        response = await call(**body)
        assert response.status_code == 200, response.text
        assert "ferrule" not in response.json()
    first, second = (request.grammar for request in site.service.requests[-2:])
    assert first == second
    return first


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_json": None, "guided_json_object": False}, None),
        ({"guided_json": SCHEMA}, Json(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, Json(SCHEMA)),
        ({"guided_json": {}}, Json({})),
        ({"guided_json": True}, Json(True)),
        ({"guided_regex": "a+"}, Regex("a+")),
        ({"guided_choice": ["b", "a", "b"]}, OneOf((Fixed("b"), Fixed("a")))),
        ({"guided_grammar": 'root ::= "a"'}, Rules('root ::= "a"')),
        ({"guided_json_object": True}, Json({"type": "object"})),
        ({"response_format": {"type": "json_object"}}, Json({"type": "object"})),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, Json(SCHEMA)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": False},
                }
            },
            Json(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Json(SCHEMA)),
        ({"structured_outputs": {"regex": "a"}}, Regex("a")),
        ({"structured_outputs": {"choice": ["a"]}}, OneOf((Fixed("a"),))),
        ({"structured_outputs": {"grammar": "start: A"}}, Rules("start: A")),
        ({"structured_outputs": {"json_object": True}}, Json({"type": "object"})),
    ],
)
async def test_each_way_of_saying_it(site: Site, body: dict[str, Any], form: Form | None) -> None:
    found = await constraint(site, **body)
    assert (found and found.form) == form
    assert found is None or found == GrammarSpec(form=found.form)
    if isinstance(form, Json) and form.schema == SCHEMA:
        assert found is not None
        assert json.dumps(found.form.schema) == json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"guided_decoding_backend": "outlines"}, {"backend": "outlines"}),
        ({"guided_decoding_backend": "auto"}, {"backend": "auto"}),
        (
            {"guided_decoding_backend": "xgrammar:no-fallback,disable-any-whitespace"},
            {"backend": "xgrammar", "fallback": False, "any_whitespace": False},
        ),
        (
            {"guided_decoding_backend": "guidance:disable-additional-properties"},
            {"backend": "guidance", "additional_properties": False},
        ),
        ({"guided_decoding_backend": "auto:unbounded-whitespace"}, {"backend": "auto", "bounded_whitespace": False}),
        ({"guided_whitespace_pattern": "[ ]?"}, {"whitespace_pattern": "[ ]?"}),
    ],
)
async def test_options_of_any_constraint(site: Site, body: dict[str, Any], options: dict[str, Any]) -> None:
    for stated in ({"guided_json": {}}, {"structured_outputs": {"json": {}}}):
        assert await constraint(site, **stated, **body) == GrammarSpec(form=Json({}), **options)


async def test_options_of_structured_outputs(site: Site) -> None:
    own = {"whitespace_pattern": " ", "disable_any_whitespace": True, "disable_additional_properties": True}
    assert await constraint(site, structured_outputs={"json": {}, **own}) == GrammarSpec(
        form=Json({}), whitespace_pattern=" ", any_whitespace=False, additional_properties=False
    )


@pytest.mark.parametrize("field", ["guided_decoding_backend", "guided_whitespace_pattern"])
async def test_options_without_a_constraint_are_named(site: Site, field: str) -> None:
    response = await site.complete(**{field: "outlines"})
    (warning,) = response.json()["ferrule"]["warnings"]
    assert warning.startswith(f"{field}: ")


# ------------------------------------------------------------------------------------------------ structural tags

NUMBER = {"type": "regex", "pattern": "[0-9]"}
DIGIT = Regex("[0-9]")


def tag(name: str, content: dict[str, Any] = NUMBER, **fields: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>", **fields}


A, B = tag("a"), tag("b")
SERIES_A = Series((Fixed("<a>"), DIGIT, Fixed("</a>")))
TAG_A = Tag("<a>", DIGIT, "</a>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [A]}


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ({"type": "const_string", "value": "x"}, Fixed("x")),
        ({"type": "json_schema", "json_schema": SCHEMA}, Json(SCHEMA)),
        ({"type": "json_schema", "json_schema": {}, "style": "json", "any_order": False, "excludes": []}, Json({})),
        ({"type": "any_text", "excludes": [], "max_tokens": None, "max_chars": None}, Anything()),
        (NUMBER, DIGIT),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, Rules('root ::= "a"')),
        ({"type": "sequence", "elements": [NUMBER, {"type": "any_text"}]}, Series((DIGIT, Anything()))),
        ({"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "x"}]}, OneOf((DIGIT, Fixed("x")))),
        ({"type": "optional", "content": NUMBER}, Repeated(DIGIT, most=1)),
        ({"type": "star", "content": NUMBER}, Repeated(DIGIT)),
        ({"type": "plus", "content": NUMBER}, Repeated(DIGIT, least=1)),
        ({"type": "repeat", "content": NUMBER, "min": 2, "max": -1}, Repeated(DIGIT, least=2)),
        ({"type": "repeat", "content": NUMBER, "min": 0, "max": 3}, Repeated(DIGIT, most=3)),
        (A, SERIES_A),
        (tag("a", {"type": "any_text"}), Series((Fixed("<a>"), Until("</a>")))),
        (tag("a", {"type": "any_text"}, end=""), Series((Fixed("<a>"), Anything()))),
        (
            tag("a", end=["x", "y"]),
            Series((Fixed("<a>"), Series((DIGIT, OneOf((Fixed("x"), Fixed("y"))))))),
        ),
        (TRIGGERED, Triggered(("<",), (TAG_A,))),
        (TRIGGERED | {"stop_after_first": True}, Triggered(("<",), (TAG_A,), most=1)),
        (TRIGGERED | {"at_least_one": True}, Series((OneOf((SERIES_A,)), Triggered(("<",), (TAG_A,))))),
        (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, OneOf((SERIES_A,))),
        ({"type": "tags_with_separator", "tags": [A], "separator": ","}, Repeated(OneOf((SERIES_A,)), ",")),
        (
            {"type": "tags_with_separator", "tags": [A], "separator": ",", "at_least_one": True}
            | {"stop_after_first": True},
            Repeated(OneOf((SERIES_A,)), ",", 1, 1),
        ),
    ],
)
async def test_formats_of_structural_tags(site: Site, written: dict[str, Any], form: Form) -> None:
    whole = {"type": "structural_tag", "format": written}
    assert await constraint(site, response_format=whole) == GrammarSpec(form=form)
    assert await constraint(site, structured_outputs={"structural_tag": whole}) == GrammarSpec(form=form)
    assert await constraint(site, structured_outputs={"structural_tag": json.dumps(whole)}) == GrammarSpec(form=form)


async def test_the_older_structural_tag(site: Site) -> None:
    older = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
            {"begin": "<f=b>", "schema": {}, "end": ""},
        ],
        "triggers": ["<f="],
    }
    tags = (Tag("<f=a>", Json(SCHEMA), "</f>"), Tag("<f=b>", Json({})))
    assert await constraint(site, response_format=older) == GrammarSpec(form=Triggered(("<f=",), tags))


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ({}, ".format"),
        ({"format": 3}, ".format"),
        ({"format": {}}, ".format.type"),
        ({"format": {"type": "token", "token": 3}}, ".format.type"),
        ({"format": {"type": ["or"]}}, ".format.type"),
        ({"format": {"type": "or", "elements": []}}, ".format.elements"),
        ({"format": {"type": "or", "elements": [NUMBER, {"type": "regex"}]}}, ".format.elements[1].pattern"),
        ({"format": {"type": "const_string", "value": ""}}, ".format.value"),
        ({"format": {"type": "any_text", "excludes": ["a"]}}, ".format.excludes"),
        ({"format": {"type": "any_text", "max_tokens": 4}}, ".format.max_tokens"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, ".format.style"),
        ({"format": {"type": "json_schema", "json_schema": {}, "any_order": True}}, ".format.any_order"),
        ({"format": {"type": "repeat", "content": NUMBER, "min": 2, "max": 1}}, ".format.max"),
        ({"format": tag("a", {"type": "any_text"}, end=["x", "y"])}, ".format.end"),
        ({"format": TRIGGERED | {"triggers": ["<", "x"]}}, ".format.triggers[1]"),
        ({"format": TRIGGERED | {"triggers": ["<", "<a"]}}, ".format.triggers[1]"),
        ({"format": TRIGGERED | {"triggers": ["x"]}}, ".format.tags[0].begin"),
        ({"format": TRIGGERED | {"unknown": 1}}, ".format.unknown"),
        ({"structures": [{"begin": "<", "schema": {}, "end": ""}]}, ".triggers"),
        ({"structures": [{"begin": "<", "schema": 3, "end": ""}], "triggers": ["<"]}, ".structures[0].schema"),
        ({"structures": [{"begin": "<", "schema": {}, "end": ""}], "triggers": ["x"]}, ".structures[0].begin"),
        ({"format": NUMBER, "triggers": ["x"]}, ".triggers"),
    ],
)
async def test_structural_tags_that_cannot_be_enforced(site: Site, written: dict[str, Any], path: str) -> None:
    """Refuse at its place what has no form here, and never loosen it."""
    error = error_of(await site.chat(response_format={"type": "structural_tag", **written}))
    assert error["param"] == f"response_format{path}"


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.advisory("CVE-2026-105757")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": [SCHEMA]}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": '{"a"'}, "guided_json"),
        ({"guided_json": "NaN"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_regex": "(" * 65 + ")" * 65}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_grammar": " \n"}, "guided_grammar"),
        ({"guided_json_object": "yes"}, "guided_json_object"),
        ({"guided_json": {}, "guided_decoding_backend": "xgrammar:fast"}, "guided_decoding_backend"),
        ({"guided_json": {}, "guided_decoding_backend": ":no-fallback"}, "guided_decoding_backend"),
        ({"guided_json": {}, "guided_whitespace_pattern": ""}, "guided_whitespace_pattern"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json"),
        ({"structured_outputs": {"reegx": "a"}}, "structured_outputs.reegx"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
)
async def test_refusals_name_the_place(site: Site, body: dict[str, Any], param: str) -> None:
    assert error_of(await site.chat(**body))["param"] == param


STATED: dict[str, Any] = {
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "start: A",
    "guided_json_object": True,
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
}


async def test_two_constraints_are_both_named(site: Site) -> None:
    names = list(STATED)
    for first, second in zip(names, [*names[1:], names[0]], strict=True):
        error = error_of(await site.complete(**{first: STATED[first], second: STATED[second]}))
        assert first in error["message"]
        assert second in error["message"]


async def test_two_white_space_patterns(site: Site) -> None:
    own = {"json": {}, "whitespace_pattern": " "}
    error = error_of(await site.complete(structured_outputs=own, guided_whitespace_pattern=" "))
    assert error["param"] == "guided_whitespace_pattern"


@pytest.mark.parametrize("field", STATED)
async def test_what_a_constraint_does_not_go_with(site: Site, field: str) -> None:
    stated = {field: STATED[field]}
    for call in (site.complete, site.chat):
        error = error_of(await call(**stated, use_beam_search=True, n=2))
        assert error["param"] == field
        assert "use_beam_search" in error["message"]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        error = error_of(await site.chat(**stated, tools=[TOOL], tool_choice=choice))
        assert error["param"] == field
        assert "tool_choice" in error["message"]
    assert (await site.chat(**stated, tools=[TOOL], tool_choice="none")).status_code == 200
    assert (await site.complete(**stated, echo=True)).status_code == 200
    assert (await site.complete(**stated, suffix="b")).status_code == 200


async def test_refusals_of_the_service_get_the_name_of_the_field() -> None:
    site = Site()
    site.service.refusal = RequestError("The constraint cannot be enforced here.", "structured_outputs")
    for call in (site.complete, site.chat):
        assert error_of(await call(guided_regex="a"))["param"] == "guided_regex"
        assert error_of(await call(structured_outputs={"regex": "a"}))["param"] == "structured_outputs"


def nested(levels: int) -> Any:
    value: Any = True
    for _ in range(levels):
        value = {"not": value}
    return value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"properties": {f"property{number}": {} for number in range(10_000)}}),
        ("guided_json", '{"not":' * 30_000),
        ("guided_json", "[" * 60_000),
        ("guided_json", json.dumps(nested(65))),
        ("guided_json", " " * (64 << 10) + "{}"),
        ("guided_choice", ["a"] * 100_000),
        ("guided_choice", [str(number) * 100 for number in range(4000)]),
        ("guided_regex", "(a+)+" * 20_000),
        ("guided_grammar", "é" * (40 << 10)),
        ("response_format", {"type": "structural_tag", "format": {"type": "or", "elements": [NUMBER] * 10_000}}),
        ("structured_outputs", {"choice": ["a"] * 100_000}),
    ],
)
async def test_what_is_too_large_is_refused(site: Site, field: str, value: Any) -> None:
    error = error_of(await site.complete(**{field: value}))
    assert error["param"].startswith(field)
    assert len(error["message"]) < 200


async def test_the_largest_are_taken(site: Site) -> None:
    """Accept the bounds themselves."""
    padded = json.dumps(nested(64)).ljust(64 << 10)
    for stated in (
        {"guided_json": padded},
        {"guided_choice": [str(number) for number in range(4096)]},
        {"guided_regex": "(" * 64 + "a" + ")" * 64},
        {"guided_regex": r"[((((]\(" * 100},  # brackets that are not groups
        {"guided_grammar": "a" * (64 << 10)},
    ):
        assert await constraint(site, **stated) is not None


# ------------------------------------------------------------------------------------------------ the official client


class Event(BaseModel):
    """A model from OpenAI's guide to structured outputs."""

    name: str
    people: list[str]


async def test_the_official_client_parses(site: Site) -> None:
    """Accept the body that ``.parse`` sends, whose schema is the one that it closes."""
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=site.http)
    with pytest.raises(openai.LengthFinishReasonError):  # of the scripted answer
        await client.chat.completions.parse(
            model="", messages=[{"role": "user", "content": "Who?"}], response_format=Event
        )
    found = site.last.grammar
    assert found is not None
    assert isinstance(found.form, Json)
    assert isinstance(found.form.schema, dict)
    assert found.form.schema["required"] == ["name", "people"]
    assert found.form.schema["additionalProperties"] is False
