"""Constraints that ended other servers, by backend: an answer in time, nothing on the disk, memory with a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ferrule.config import Config, DecodingConfig
from ferrule.config.resolve import resolve
from ferrule.errors import RequestError
from ferrule.forms import Fixed, Form, GrammarSpec, Json, Regex, Rules
from ferrule.frontend.guided import compiler as compilers
from ferrule.frontend.guided.compiler import GrammarCompiler
from ferrule.frontend.output.parse import ParseChain, Parsers
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule.interfaces.parsers import ChoiceContext
from ferrule.plugin import discover
from ferrule.types import CompiledGrammar
from ferrule_plugins.tool_parser.hermes import Hermes
from tests.e2e.http.test_hostile import LEAKS

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
SLOW = pytest.mark.slow  # a child that is killed is started again, and its library takes seconds to import
WORDS = Vocabulary((*(bytes([byte]) for byte in range(256)), b"", b'{"'), 264, (256,))
INVALID = ("*a", "(", "[z-a]", r"\p{", "(?<=a)b", "(?=a)b", r"(a)\1", "a{5,2}", "(?P<a", "\\", "[")
EXPLOSIVE = (
    "a**",
    *("(a+)+b", "(a*)*b", "(a|a)*b", "(a|aa)+c", "([a-z]+)*[0-9]", "(.*)*x", "(x+x+)+y", "((a{1,900}){1,900}){1,900}"),
    *("[ab]*a[ab]{24}", "(a?){500}a{500}", "(" * 60 + "a" + ")*" * 60, "a{1,100000000}", "(.{1,9999}){1,9999}"),
)
OTHERS: tuple[Form, ...] = (
    Json({"type": "string", "pattern": "(a+)+b"}),
    Json({"type": "array", "minItems": 10**9, "items": {}}),
    Json({"type": "string", "minLength": 10**9}),
    Json({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    Rules('root ::= root "a" | "b"'),
    Rules("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    Rules("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    Regex("(" * 30_000 + "a" + ")" * 30_000),
)
BAD_SCHEMAS: tuple[Any, ...] = (
    {"type": "nothing"},
    {"type": 5},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+(?=b)"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "[z-a]"}}},
    {"type": "object", "properties": []},
    {"type": "object", "required": "a"},
    {"type": "object", "$ref": "#/a", "a": {"$ref": "#/a"}},
)


def compiler(backend: str) -> GrammarCompiler:
    settings = DecodingConfig(guided_decoding_backend=backend, guided_decoding_disable_fallback=True)
    return GrammarCompiler(discover(), resolve(Config(decoding=settings)).decoding, lambda: WORDS)


async def ask(guided: GrammarCompiler, form: Form) -> CompiledGrammar | RequestError:
    (answer,) = await asyncio.gather(guided.compile(GrammarSpec(form=form), "x"), return_exceptions=True)
    if isinstance(answer, CompiledGrammar):
        return answer
    assert isinstance(answer, RequestError)
    assert answer.status in {400, 429}  # 429: the children were busy with the others
    assert answer.param in {"x", None}
    assert not LEAKS.search(answer.message)
    return answer


@pytest.mark.advisory(
    "CVE-2025-29770", "CVE-2025-48943", "CVE-2026-55574", "CVE-2025-57809", "libraries-of-guided-decoding"
)
@pytest.mark.parametrize("backend", [pytest.param(each, marks=[] if each == "guidance" else SLOW) for each in BACKENDS])
async def test_each_backend_answers_and_leaves_nothing_on_the_disk(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace a child that takes longer than the deadline, or dies: a right constraint is compiled afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "OUTLINES_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(compilers, "_SECONDS", 0.5)
    guided = compiler(backend)
    right = GrammarSpec(form=Fixed("ok"))
    try:
        monkeypatch.setattr(compilers, "_SECONDS", 60.0)  # a first child imports its library
        await guided.compile(right, "x")
        for pattern in INVALID:
            assert isinstance(await ask(guided, Regex(pattern)), RequestError), pattern
        monkeypatch.setattr(compilers, "_SECONDS", 0.5)
        await asyncio.gather(*(ask(guided, form) for form in (*map(Regex, EXPLOSIVE), *OTHERS)))
        monkeypatch.setattr(compilers, "_SECONDS", 60.0)
        await guided.compile(GrammarSpec(form=Fixed("still")), "x")
        for number in range(20):
            await guided.compile(GrammarSpec(form=Json({"const": f"a{number}"})), "x")
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    finally:
        await guided.close()


@pytest.mark.advisory("GHSA-hf3c-wxg2-49q9")
async def test_compiled_constraints_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    guided = compiler("guidance")
    try:
        one = await guided.compile(GrammarSpec(form=Fixed("0")), "x")
        most = 10 * len(one.data)
        monkeypatch.setattr(compilers, "_CACHE_BYTES", most)
        for number in range(40):
            await guided.compile(GrammarSpec(form=Fixed(str(number % 10) + "a" * (number // 10))), "x")
            assert sum(len(each.data) for each in guided._compiled.values()) <= most
        assert 0 < len(guided._compiled) <= 10
        assert await guided.compile(GrammarSpec(form=Fixed("0")), "x") is not one  # it was dropped, and is made again
    finally:
        await guided.close()


@pytest.mark.advisory("CVE-2025-48944")
async def test_parameters_of_tools_go_through_the_same_gate() -> None:
    guided = compiler("guidance")
    parsers = Parsers(tools=Hermes)
    try:
        for schema in BAD_SCHEMAS:
            tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
            for choice in ("required", {"type": "function", "function": {"name": "f"}}):
                spec = ParseChain(parsers, tools, ChoiceContext(tools=tools, tool_choice=choice)).constraint
                assert spec is not None
                with pytest.raises(RequestError) as caught:
                    await guided.compile(spec, "tool_choice")
                assert caught.value.status == 400
                assert not LEAKS.search(caught.value.message)
        await guided.compile(GrammarSpec(form=Fixed("ok")), "x")
    finally:
        await guided.close()
