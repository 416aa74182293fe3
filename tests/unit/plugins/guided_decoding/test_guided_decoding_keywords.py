"""Each keyword of JSON Schema is enforced completely or refused, by every built-in backend; jsonschema is the judge."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import jsonschema
import pytest

from ferrule.forms import GrammarSpec, Json
from ferrule.interfaces.guided_decoding import GrammarBackend
from ferrule.plugin import discover
from ferrule_testkit.kits.guided_texts import MERGED, accepts, first_refused, sample, vocabulary, whole_tokens_of
from tests.unit.plugins.guided_decoding.grid import GRID, Row

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
ONLY_NAMED = ("outlines", "lm-format-enforcer")  # they never write properties that a schema does not name
WHOLE_CHARACTERS = "lm-format-enforcer"  # it follows no token that is a part of one
MANY, FEW = 20, 4  # random texts
JUDGE = jsonschema.Draft202012Validator
PLUGINS = discover()


@lru_cache(maxsize=len(BACKENDS))
def backend(name: str) -> GrammarBackend:
    characters = sorted({char for char in json.dumps([row[1] for row in GRID], ensure_ascii=False) if char >= "\x80"})
    merged = (*MERGED, *(char for char in characters if char not in MERGED))
    made: GrammarBackend = PLUGINS.make("guided_decoding", name, vocabulary(merged))
    return made


def check(name: str, row: Row, samples: int) -> None:
    found, spec = backend(name), GrammarSpec(form=Json(row.schema))
    if found.refuses(spec) is not None:
        return
    data = found.compile(spec)

    def allows(value: Any, **style: Any) -> bool:
        text = json.dumps(value, ensure_ascii=False, **style)
        ids = whole_tokens_of(text, found.vocabulary)
        if name != WHOLE_CHARACTERS and not accepts(found.load(data), found.vocabulary, text):
            return False
        return first_refused(found.load(data), found.vocabulary, ids) is None

    others = [] if name in ONLY_NAMED else row.others
    for style in ({}, {"separators": (",", ":")}):
        assert [value for value in (*row.valid, *others) if not allows(value, **style)] == []
        assert [value for value in row.invalid if allows(value, **style)] == []
    judge = JUDGE(row.schema, format_checker=JUDGE.FORMAT_CHECKER)
    for seed in range(samples):
        text = sample(found.load(data), found.vocabulary, random.Random(seed), 8 + seed)
        assert text is None or judge.is_valid(json.loads(text)), text


@pytest.mark.advisory("CVE-2025-48942")
@pytest.mark.parametrize("name", BACKENDS)
def test_some_of_the_keywords(name: str) -> None:
    for row in GRID[::5]:
        check(name, row, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("row", GRID, ids=lambda row: json.dumps(row.schema)[:60])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_keyword(name: str, row: Row) -> None:
    check(name, row, MANY)


@pytest.mark.parametrize("row", GRID, ids=lambda row: json.dumps(row.schema)[:60])
def test_the_grid_is_right(row: Row) -> None:
    judge = JUDGE(row.schema, format_checker=JUDGE.FORMAT_CHECKER)
    if "dependencies" in json.dumps(row.schema):
        judge = jsonschema.Draft7Validator(row.schema)
    assert [value for value in (*row.valid, *row.others) if not judge.is_valid(value)] == []
    assert [value for value in row.invalid if judge.is_valid(value)] == []


def test_what_people_ask_for_is_not_refused() -> None:
    """Enforce these: refusing everything would be correct."""
    common = {
        "type": "object",
        "title": "Person",
        "properties": {
            "name": {"type": "string", "description": "Who."},
            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "born": {"type": "string", "format": "date"},
            "kind": {"enum": ["a", "b"], "type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name"],
    }
    refused = {name: backend(name).refuses(GrammarSpec(form=Json(common))) for name in BACKENDS}
    assert refused == dict.fromkeys(BACKENDS)
