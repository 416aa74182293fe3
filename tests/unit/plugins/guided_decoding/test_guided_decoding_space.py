"""White space between the parts of JSON, by every built-in backend; `json` and a pattern are the judges."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from typing import Any

import pytest

from ferrule.forms import Fixed, Form, GrammarSpec, Json, Series
from ferrule.interfaces.guided_decoding import GrammarBackend
from ferrule.plugin import discover
from ferrule_plugins.guided_decoding.spaces import indentation
from ferrule_testkit.kits.guided_texts import accepts, sample, vocabulary

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
VOCABULARY = vocabulary()
LIST = {"type": "array", "items": {"type": "integer"}}
NESTED = {"type": "object", "properties": {"a": LIST}, "required": ["a"], "additionalProperties": False}
PARTS = ("{", '"a"', ":", "[", "1", ",", "2", "]", "}")
NONE, FORMATTED = re.compile(""), re.compile(r"(?: |\n {0,8}|\n\t{1,2})?")
ANY = re.compile(r"[ \n\r\t]*")
PLUGINS = discover()


@lru_cache(maxsize=len(BACKENDS))
def backend(name: str) -> GrammarBackend:
    made: GrammarBackend = PLUGINS.make("guided_decoding", name, VOCABULARY)
    return made


@pytest.mark.parametrize("form", [Json(NESTED), Series((Json(NESTED), Fixed("!")))])
@pytest.mark.parametrize(
    ("options", "space"),
    [
        ({}, FORMATTED),
        ({"bounded_whitespace": False}, ANY),
        ({"any_whitespace": False}, NONE),
        ({"any_whitespace": False, "bounded_whitespace": False}, NONE),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_white_space_is_what_the_constraint_says(
    name: str, options: dict[str, Any], space: re.Pattern[str], form: Form
) -> None:
    found = backend(name)
    data = found.compile(GrammarSpec(form=form, **options))
    source, end = random.Random(0), "" if isinstance(form, Json) else "!"
    tried = [
        "",
        " ",
        "\n",
        "\n  ",
        "\n" + 8 * " ",
        "\n\t",
        "\n\t\t",
        "  ",
        "\t",
        "\n\n",
        " \n",
        "\n" + 9 * " ",
        "\n \t",
    ]
    for text in (*tried, "\n\t\t\t", "\r\n", " \t", "\n" + 40 * " "):
        at = source.choice([at for at, part in enumerate(PARTS) if at and part not in ":,"])
        written = "".join((*PARTS[:at], text, *PARTS[at:], end))
        assert accepts(found.load(data), VOCABULARY, written) is bool(space.fullmatch(text)), written


@pytest.mark.parametrize("indent", [None, 1, 2, 3, 4, "\t"])
@pytest.mark.parametrize("name", BACKENDS)
def test_what_json_dumps_writes_is_allowed(name: str, indent: Any) -> None:
    found = backend(name)
    data = found.compile(GrammarSpec(form=Json(NESTED)))
    assert accepts(found.load(data), VOCABULARY, json.dumps({"a": [1, 2]}, indent=indent))
    assert accepts(found.load(data), VOCABULARY, json.dumps({"a": []}, indent=indent))


@pytest.mark.parametrize(
    "schema", [NESTED, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "string"}}}]
)
@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_random_texts_have_bounded_space(name: str, schema: dict[str, Any]) -> None:
    found = backend(name)
    data = found.compile(GrammarSpec(form=Json(schema)))
    spaces, tabs = indentation(schema)
    for seed in range(8):
        text = sample(found.load(data), VOCABULARY, random.Random(seed), 40)
        for space in re.findall(r"\s+", re.sub(rb'"(?:[^"\\]|\\.)*"', b"0", text or b"").decode()):
            assert space == " " or re.fullmatch(rf"(?:\n {{0,{spaces}}}|\n\t{{1,{tabs}}})", space), text


TREE = {"type": "object", "properties": {"next": {"$ref": "#"}, "value": LIST}}


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        ({"type": "integer"}, 0),
        ({"enum": [1, "a"]}, 0),
        ({"enum": [[1]]}, 3),
        (LIST, 1),
        (NESTED, 2),
        (True, 3),
        ({"type": "object"}, 3),
        ({"anyOf": [LIST, {"type": "null"}]}, 1),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": NESTED}}, 3),
        (TREE, 8),
        ({"$ref": "#"}, 3),
    ],
)
def test_indentation_follows_the_levels_of_the_schema(schema: Any, levels: int) -> None:
    assert indentation(schema) == (4 * levels, max(1, levels))
