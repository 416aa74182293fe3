"""Compiling constraints in children: what is compiled once, what is refused, and what a hostile one can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ferrule.config import Config, DecodingConfig
from ferrule.config.resolve import resolve
from ferrule.errors import RequestError
from ferrule.forms import Fixed, Form, GrammarSpec, Json, Regex, Rules
from ferrule.frontend.children.pool import ChildPool
from ferrule.frontend.guided.compiler import GrammarCompiler
from ferrule.interfaces.guided_decoding import Vocabulary
from ferrule.plugin import discover
from ferrule.types import CompiledGrammar

WORDS = Vocabulary((*(bytes([byte]) for byte in range(256)), b"", b'{"'), 264, (256,))


def compiler(**settings: Any) -> GrammarCompiler:
    return GrammarCompiler(discover(), resolve(Config(decoding=DecodingConfig(**settings))).decoding, lambda: WORDS)


@pytest.fixture
async def guided() -> AsyncIterator[GrammarCompiler]:
    made = compiler(guided_decoding_backend="guidance", guided_decoding_disable_fallback=True)
    yield made
    await made.close()


def spec(form: Form, **more: Any) -> GrammarSpec:
    return GrammarSpec(form=form, **more)


async def test_a_constraint_is_compiled_once(guided: GrammarCompiler) -> None:
    one, two = await asyncio.gather(*(guided.compile(spec(Regex("a+")), "x") for _ in range(2)))
    assert one is two
    assert await guided.compile(spec(Regex("a+")), "x") is one
    assert (await guided.compile(spec(Regex("a*")), "x")).digest != one.digest
    assert (await guided.compile(spec(Regex("a+"), any_whitespace=False), "x")).digest != one.digest


@pytest.mark.advisory("CVE-2025-48942")
@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Regex("("), "unclosed group"),
        (Regex("a(?=b)"), "look-around"),
        (Rules("start: a"), "unknown"),
        (Rules('root ::= "a'), "wrong"),
        (Json({"type": 5}), "type"),
        (Json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Json({"$ref": "#/x", "x": {"$ref": "#/x"}}), "level exceeded"),
        (Json({"enum": []}), "empty"),
        (Json(False), "false"),
    ],
)
async def test_what_cannot_be_enforced_is_refused(guided: GrammarCompiler, form: Form, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await guided.compile(spec(form), "guided")
    assert caught.value.param == "guided"
    assert "0x" not in caught.value.message
    await guided.compile(spec(Fixed("ok")), "guided")  # the child, or another one, goes on


_NAMED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def test_what_cannot_be_completed_is_refused_before_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a schema in which the only name that the pattern matches is taken: nothing can follow a comma."""
    monkeypatch.setattr("ferrule_plugins.guided_decoding.guidance._folded", lambda schema: schema)
    source = {**_NAMED, "patternProperties": {"^(?:a)$": {"type": "integer"}}}
    made = discover().make("guided_decoding", "guidance", WORDS)
    with pytest.raises(ValueError, match="NoExtensionBias"):
        made.compile(spec(Json(source)))
    made.compile(spec(Json(_NAMED)))


async def test_what_is_wrong_for_one_library_is_asked_of_the_next() -> None:
    guided = compiler(guided_decoding_backend="xgrammar")
    never = {"type": "integer", "minimum": 3, "maximum": 2}
    try:
        form = Json({"type": "object", "properties": {"a": never}})
        assert (await guided.compile(spec(form), "x")).backend == "guidance"
        with pytest.raises(RequestError, match="minimum greater than maximum"):
            await guided.compile(spec(Json(never)), "x")
    finally:
        await guided.close()


@pytest.mark.advisory("CVE-2025-57809")
async def test_left_recursion_and_deep_nesting_are_answered(guided: GrammarCompiler) -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    nested = Rules("root ::= " + "(" * 5000 + '"a"' + ")" * 5000)
    forms: list[Form] = [Rules('root ::= root "a" | "b"'), Json(deep), nested, Regex("((a{1,900}){1,900}){1,900}")]
    found = await asyncio.gather(*(guided.compile(spec(form), "x") for form in forms), return_exceptions=True)
    assert all(isinstance(one, CompiledGrammar | RequestError) for one in found), found
    await guided.compile(spec(Fixed("ok")), "guided")


async def test_an_unknown_backend_is_named() -> None:
    guided = compiler()
    try:
        with pytest.raises(RequestError, match="Unknown .* backend 'guidence'. Did you mean 'guidance'") as caught:
            await guided.compile(spec(Regex("a"), backend="guidence"), "guided")
        assert caught.value.param == "guided_decoding_backend"
    finally:
        await guided.close()


async def test_first_requests_share_the_children(guided: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(ChildPool):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr("ferrule.frontend.guided.compiler.ChildPool", Counted)
    await asyncio.gather(*(guided.compile(spec(Regex(pattern)), "x") for pattern in ("a", "b")))
    assert len(made) == 1


async def test_the_engine_is_told_of_a_backend_once_and_before_a_child_has_started() -> None:
    expected: list[tuple[str, frozenset[int]]] = []
    settings = DecodingConfig(guided_decoding_backend="guidance", guided_decoding_disable_fallback=True)
    guided = GrammarCompiler(
        discover(),
        resolve(Config(decoding=settings)).decoding,
        lambda: WORDS,
        lambda backend: expected.append((backend, guided.pids)),
    )
    try:
        for pattern in ("a", "b"):
            await guided.compile(spec(Regex(pattern)), "x")
        assert expected == [("guidance", frozenset())]
    finally:
        await guided.close()


async def test_a_server_without_a_tokenizer_starts_no_child() -> None:
    guided = GrammarCompiler(discover(), resolve(Config()).decoding, None)
    with pytest.raises(RequestError, match="without a tokenizer") as caught:
        await guided.compile(spec(Regex("a")), "x")
    assert caught.value.param == "x"
    assert not guided.pids


async def test_constraints_have_a_size(guided: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="more than 1 MiB") as caught:
        await guided.compile(spec(Json({"description": "x" * (1 << 20)})), "tools")
    assert caught.value.param == "tools"
    assert not guided.pids
    monkeypatch.setattr("ferrule.frontend.guided.compiler._MAX_COMPILED_BYTES", 100)
    with pytest.raises(RequestError, match="guidance: it takes more than 0 MiB when it is compiled"):
        await guided.compile(spec(Regex("a" * 100)), "x")


@pytest.mark.parametrize("form", [Fixed("\ud800"), Json({"const": "\ud800"}), Json({"const": 1 << 70})])
async def test_values_that_cannot_be_sent_to_a_child_are_refused(guided: GrammarCompiler, form: Form) -> None:
    with pytest.raises(RequestError) as caught:
        await guided.compile(spec(form), "x")
    assert caught.value.param == "x"


async def test_children_end_with_the_compiler() -> None:
    guided = compiler(guided_decoding_backend="guidance")
    await guided.compile(spec(Regex("a")), "guided")
    assert len(guided.pids) == 1
    await guided.close()
    assert not guided.pids
