"""The benchmark of constraints: its text fits its schema, and its figures come from the real backend."""

from __future__ import annotations

import json
import re

import jsonschema

from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule_plugins.guided_decoding.guidance import Guidance
from tools.benchmarks.guided import example, measure, tokenize

WORDS = Vocabulary((*(bytes([byte]) for byte in range(256)), b'{"', b'": ', b""), 300, (258,))


def test_the_text_is_a_value_of_the_schema() -> None:
    schema, text = example(7)
    jsonschema.validate(json.loads(text), schema)
    assert b"".join(WORDS.tokens[token] for token in tokenize(text, WORDS)).decode() == text


def test_figures() -> None:
    schema, text = example(5)
    told = measure(Guidance(WORDS), schema, tokenize(text, WORDS), rounds=1)
    assert re.fullmatch(r"compile \d+ ms, load \d+ ms \(\d+ bytes\), mask p50 \d+ µs, p90 \d+ µs; .* mean \d+ µs", told)
