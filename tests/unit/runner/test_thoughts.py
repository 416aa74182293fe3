"""A limit on thoughts: counted exactly, ended by the tokens of the closing tag, and free before and behind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.assembly.vocabulary import open_backend, open_tokenizer
from ferrule.forms import GrammarSpec, Regex, Series, Until
from ferrule.interfaces.guided_decoding import GrammarBackend
from ferrule.interfaces.tokenizer import Tokenizer
from ferrule.runner.thoughts import ThoughtCounter
from ferrule.types import CompiledGrammar, FinishReason, ThoughtLimit
from ferrule_testkit.harness import Harness

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23], [31, 32, 33, 34, 35]]


def piece(id: int) -> bytes:
    return bytes([id])


def limit(tokens: int, *, inside: bool = False, again: bool = False, opens: Sequence[str] = ("<t>",)) -> ThoughtLimit:
    return ThoughtLimit(
        tokens=tokens, inside=inside, opens=tuple(opens), closes=("</t>", "[e]"), end_ids=tuple(b"</t>"), again=again
    )


def generate(text: str, limit: ThoughtLimit) -> str:
    """Return the output of a model that writes `text`, byte by byte, where it is free to."""
    counter, written, wanted = ThoughtCounter(limit, piece), b"", list(text.encode())
    while wanted or counter.forced is not None:
        token = wanted.pop(0) if counter.forced is None else counter.forced
        counter.accept([token])
        written += bytes([token])
    return written.decode()


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("<t>abcdef", limit(3), "<t>abc</t>def"),
        ("x<t>abcdef", limit(0), "x<t></t>abcdef"),
        ("<t>ab</t>cdefgh", limit(6), "<t>ab</t>cdefgh"),
        ("<t>ab[e]cdefgh", limit(5), "<t>ab[e]cdefgh"),
        ("abcdef", limit(3), "abcdef"),
        ("abcdef", limit(3, inside=True), "abc</t>def"),
        ("abcdef", limit(0, inside=True), "</t>abcdef"),
        ("<t>a</t><t>bcdefgh", limit(5), "<t>a</t><t>bcdefgh"),  # the second block is content
        ("<t>a</t><t>bcdefgh", limit(6, again=True), "<t>a</t><t>b</t>cdefgh"),
        ("<t>abc<t>d", limit(2, again=True), "<t>ab</t>c<t></t>d"),
        ("<<t>abcdef", limit(2), "<<t>ab</t>cdef"),
        ("abcdef", limit(2, opens=()), "abcdef"),
        ("abcdef", limit(2, opens=(), inside=True), "ab</t>cdef"),
    ],
)
def test_thoughts_end_after_so_many_tokens(text: str, given: ThoughtLimit, expected: str) -> None:
    assert generate(text, given) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<t>", "</t>", "[e]", "<", "t>", "/", "a", "é"]), max_size=12), st.integers(0, 9))
def test_what_tokens_a_text_is_cut_into_decides_the_count_and_not_where_tags_are(parts: list[str], most: int) -> None:
    """Agree on whether reasoning is open with a counter that gets whole parts and one that gets bytes."""
    tokens = [part.encode() for part in parts]
    whole = ThoughtCounter(limit(1000), tokens.__getitem__)
    whole.accept(range(len(tokens)))
    cut = ThoughtCounter(limit(1000), piece)
    cut.accept(list(b"".join(tokens)))
    assert (whole._inside, whole._over) == (cut._inside, cut._over)


# ------------------------------------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def harness(tiny_llama: Path) -> Iterator[Harness]:
    with Harness(tiny_llama, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(harness: Harness) -> Tokenizer:
    found = open_tokenizer(harness.config, harness.plugins, Path(harness.config.model.tokenizer))
    assert found is not None
    return found


def budget(tokenizer: Tokenizer, tokens: int) -> ThoughtLimit:
    end = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    return ThoughtLimit(tokens=tokens, inside=True, opens=("<think>",), closes=("</think>",), end_ids=end)


@pytest.mark.advisory("GHSA-fpch-3xrf-7q96")
@pytest.mark.parametrize("depth", [1, 2])
def test_the_end_is_forced_and_neighbours_keep_their_tokens(harness: Harness, tokenizer: Tokenizer, depth: int) -> None:
    free = harness.engine().run(PROMPTS, max_tokens=30)
    for tokens in (0, 1, 7):
        given = budget(tokenizer, tokens)
        limited = harness.engine(depth=depth).run(PROMPTS, max_tokens=30, thoughts=given)
        for output, before in zip(limited, free, strict=True):
            ids = output.token_ids
            assert ids[:tokens] == before.token_ids[:tokens]
            assert tuple(ids[tokens : tokens + len(given.end_ids)]) == given.end_ids
            assert len(ids) == 30
            assert not set(given.end_ids) >= set(ids[tokens + len(given.end_ids) :])


def test_preemption_counts_what_was_generated_before(harness: Harness, tokenizer: Tokenizer) -> None:
    given = budget(tokenizer, 20)
    shape = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "thoughts": given}
    prompts = [[5, 6, 7, 8, 9, 10, 11, number] for number in range(5)]
    plenty = harness.engine().run(prompts, **shape)
    tight = harness.engine(num_blocks=26, max_num_batched_tokens=6).run(prompts, **shape)
    assert sum(output.num_preemptions for output in tight) > 0
    for output, before in zip(tight, plenty, strict=True):
        assert output.token_ids == before.token_ids
        assert tuple(output.token_ids[20 : 20 + len(given.end_ids)]) == given.end_ids


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["guidance", "xgrammar"])
def test_a_format_behind_the_thoughts_holds(harness: Harness, tokenizer: Tokenizer, name: str, depth: int) -> None:
    opening = partial(open_tokenizer, harness.config, harness.plugins, Path(harness.config.model.tokenizer))
    backend: GrammarBackend = open_backend(harness.config, harness.plugins, opening, harness.info.vocab_size, name)
    form = Series((Until("</think>"), Regex("[a-c]{4}")))
    data = backend.compile(GrammarSpec(form=form))
    grammar = CompiledGrammar(backend=name, digest=data + name.encode(), data=data)
    stops = backend.vocabulary.stop_ids
    outputs = harness.engine(depth=depth).run(
        PROMPTS,
        grammars=[grammar] * 3,
        max_tokens=60,
        temperature=1.0,
        stop_token_ids=stops,
        thoughts=budget(tokenizer, 9),
    )
    for output in outputs:
        assert output.finish is FinishReason.STOP
        text = b"".join(backend.vocabulary.tokens[id] for id in output.token_ids[9:]).decode()
        assert re.fullmatch("</think>[a-c]{4}", text)
