"""How the backends of guided decoding do in the JSON Schema Test Suite.

    python -m tools.benchmarks.json_schema_suite FOLDER [BACKEND ...]

FOLDER is a copy of https://github.com/json-schema-org/JSON-Schema-Test-Suite. The table is for docs/benchmarks. A wrong
acceptance is an invalid instance that the grammar allows, or a random text of the grammar that the package jsonschema
finds invalid. The exit status is 1 when there is one.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

from ferrule.forms import GrammarSpec, Json
from ferrule.interfaces.guided_decoding import GrammarBackend
from ferrule.plugin import discover
from ferrule_testkit.kits.base import Broken
from ferrule_testkit.kits.guided_texts import accepts, sample, vocabulary

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}
COLUMNS = (
    "schemas",
    "refused",
    "wrong acceptances",
    "invalid samples",
    "dead ends",
    "wrong rejections",
    "instances",
    "unfinished",
)
_SAMPLES = 20


def cases(folder: Path) -> Iterator[tuple[str, Any, Any, list[dict[str, Any]]]]:
    """Yield (name, validator, schema, instances with "data" and "valid") of the required tests."""
    for draft, validator in DRAFTS.items():
        for file in sorted((folder / "tests" / draft).glob("*.json")):
            for case in json.loads(file.read_text()):
                judge = validator(_exact(case["schema"]), format_checker=validator.FORMAT_CHECKER)
                yield f"{draft}/{file.stem}: {case['description']}", judge, case["schema"], case["tests"]


def run(backend: GrammarBackend, validator: Any, schema: Any, tests: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (column, observation) for one schema."""
    yield "schemas", ""
    spec = GrammarSpec(form=Json(schema))
    try:
        if refused := backend.refuses(spec):
            yield "refused", refused
            return
        data = backend.compile(spec)
    except ValueError as error:
        yield "refused", str(error)
        return
    for test in tests:
        yield "instances", ""
        for text in (json.dumps(test["data"], separators=(",", ":")), json.dumps(test["data"])):
            accepted = accepts(backend.load(data), backend.vocabulary, text)
            if accepted != test["valid"]:
                yield "wrong acceptances" if accepted else "wrong rejections", text
                break
    for seed in range(_SAMPLES):
        try:
            made = sample(backend.load(data), backend.vocabulary, random.Random(seed), 10 + seed)
        except Broken as error:
            yield "dead ends", str(error)
            continue
        if made is None:
            yield "unfinished", ""
        elif not _valid(validator, made):
            yield "invalid samples", repr(made)


def _valid(validator: Any, text: bytes) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text, parse_float=Decimal)))
    except re.error:  # a pattern that is right, and that Python's regular expressions do not know
        return True
    except ValueError:
        return False


def _exact(schema: Any) -> Any:
    """Return a schema whose numbers are not rounded: 1.2121 is a multiple of 0.0001."""
    return json.loads(json.dumps(schema), parse_float=Decimal)


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__)
        return 2
    plugins, wrong = discover(), 0
    print("| backend |", " | ".join(COLUMNS), "|\n|---|" + "--:|" * len(COLUMNS))
    for name in argv[1:] or BACKENDS:
        backend = plugins.make("guided_decoding", name, vocabulary())
        counts: Counter[str] = Counter()
        for case, validator, schema, tests in cases(Path(argv[0])):
            for column, seen in run(backend, validator, schema, tests):
                counts[column] += 1
                if seen:
                    print(f"{name}: {column}: {case}: {json.dumps(schema)[:300]}: {seen[:200]}", file=sys.stderr)
        print(f"| `{name}` |", " | ".join(str(counts[column]) for column in COLUMNS), "|", flush=True)
        wrong += counts["wrong acceptances"] + counts["invalid samples"] + counts["dead ends"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
