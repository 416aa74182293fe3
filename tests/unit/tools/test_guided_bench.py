"""The benchmark of constraints: its text fits its schema, and its figures come from the real backend."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from ferrule.forms import GrammarSpec, Json
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule_plugins.guided_decoding.guidance import Guidance
from tools.benchmarks.guided import example, forced, measure, memory, tokenize

WORDS = Vocabulary((*(bytes([byte]) for byte in range(256)), b'{"', b'": ', b""), 300, (258,))


def test_the_text_is_a_value_of_the_schema() -> None:
    schema, text = example(7)
    jsonschema.validate(json.loads(text), schema)
    assert b"".join(WORDS.tokens[token] for token in tokenize(text, WORDS)).decode() == text


def test_figures() -> None:
    schema, text = example(5)
    told = measure(Guidance(WORDS), schema, tokenize(text, WORDS), rounds=1)
    assert re.fullmatch(r"compile \d+ ms, load \d+ ms \(\d+ bytes\), mask p50 \d+ µs, p90 \d+ µs; .* mean \d+ µs", told)


def test_what_a_schema_determines_is_forced() -> None:
    one = {
        "type": "object",
        "properties": {"ab": {"type": "boolean"}},
        "required": ["ab"],
        "additionalProperties": False,
    }
    share = forced(Guidance(WORDS), GrammarSpec(form=Json(one), any_whitespace=False), '{"ab":true}')
    assert share == 10 / 11, "all but the first byte of true or false"


def test_memory_of_distinct_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    memory(Guidance(WORDS), "guidance", 20)
    told = capsys.readouterr().out.splitlines()
    assert [line.rpartition("after ")[2] for line in told[1:]] == [f"{count} schemas" for count in range(2, 22, 2)]
    assert all(re.match(r"guidance: \d+ MiB", line) for line in told)
