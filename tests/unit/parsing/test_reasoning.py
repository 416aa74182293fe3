"""`qwen3` and `deepseek_r1`: thoughts and answer, however the text is cut and however the prompt ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, ReasoningParser, TextDelta
from ferrule_parsing import ThinkingParser
from ferrule_plugins.reasoning_parser.tagged import DeepSeekR1, Qwen3
from ferrule_testkit.kits import ReasoningParserKit
from ferrule_testkit.kits.count import work
from ferrule_testkit.kits.reasoning_parser import Thought


class Spelled(ThinkingParser):
    """A parser for models that were trained on several spellings."""

    open_tag = ("<think>", "<thought>", "[THINK]")
    close_tag = ("</think>", "</thought>", "[/THINK]")


class TestSpelled(ReasoningParserKit):
    """Several spellings keep every promise."""

    plugin = Spelled
    samples = (
        Thought("<think>\na\n</think>\n\nb", "a", "b"),
        Thought("<thought>a</thought>b", "a", "b"),
        Thought("[THINK]a[/THINK]b", "a", "b"),
        Thought("<thought>a</think>b</thought>", "a", "b</thought>"),
        Thought("[THINK", "", "[THINK"),
    )


@pytest.mark.parametrize("tag", ["<thought>", "[THINK]"])
def test_a_prompt_may_open_and_close_the_block_in_any_spelling(tag: str) -> None:
    close = tag.replace("<", "</").replace("[", "[/")
    assert read(Spelled, f"a{close}b", prompt=f"hello {tag}\n") == ("a", "b")
    assert read(Spelled, f"Well. {tag}a{close}b") == ("a", "Well. b")
    assert read(Spelled, "b", prompt=f"hello {tag}\n\n{close}\n") == ("", "b")


def test_spellings_that_begin_with_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="begin with one another"):

        class Unclear(ThinkingParser):
            open_tag = ("<think", "<think>")


Parts = tuple[str, str]  # reasoning, content


class TestQwen3(ReasoningParserKit):
    """Every promise of the kit, with the samples that the class names."""

    plugin = Qwen3


class TestDeepSeekR1(ReasoningParserKit):
    """The same."""

    plugin = DeepSeekR1


def run(kind: type[ReasoningParser], *pieces: str, **context: str) -> Parts:
    parser = kind()
    parser.begin(ChoiceContext(**context))
    events = [event for piece in pieces for event in parser.feed(TextDelta(piece))]
    events += parser.finish()
    assert all(event.text for event in events)
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thoughts, "".join(event.text for event in events if isinstance(event, Content))


def read(kind: type[ReasoningParser], text: str, **context: str) -> Parts:
    """Parse a text in one piece and in single characters, with the same result."""
    whole = run(kind, text, **context)
    assert run(kind, *text, **context) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n\nb\n", ("a", "b\n")),
        ("<think>\n\n</think>\n\nb", ("", "b")),
        ("  \n<think>a</think>b", ("a", "b")),
        ("Well. <think>a</think>b", ("a", "Well. b")),
        ("<think>a\n\nb <think> c</think></think>d", ("a\n\nb <think> c", "</think>d")),
        ("<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
        ("<think>\na\n</thin", ("a\n</thin", "")),
        ("<think>\na\n", ("a\n", "")),
        ("a</think>b", ("", "a</think>b")),
        ("\n <thin", ("", "\n <thin")),
        ("no thoughts\n", ("", "no thoughts\n")),
        ("", ("", "")),
    ],
)
def test_qwen3(text: str, expected: Parts) -> None:
    assert read(Qwen3, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n</think>\n\nb", ("a", "b")),
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("\n<think>a</think>b", ("a", "b")),
        ("\na</think>b", ("\na", "b")),
        ("a <think> b", ("a <think> b", "")),
        ("</think>b", ("", "b")),
        ("a</think>b</think>c", ("a", "b</think>c")),
        ("<thi", ("<thi", "")),
        (" ", (" ", "")),
    ],
)
def test_deepseek_r1(text: str, expected: Parts) -> None:
    assert read(DeepSeekR1, text) == expected


@pytest.mark.parametrize("kind", [Qwen3, DeepSeekR1])
@pytest.mark.parametrize(
    ("context", "text", "expected"),
    [
        (
            {"prompt": "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
            "a <think> b</think>",
            ("", "a <think> b</think>"),
        ),
        ({"prompt": "user: </think>?\nassistant: <think>\n"}, "a\n</think>\n\nb", ("a", "b")),
        ({"prompt": "assistant: <think>"}, "<think>a</think>b", ("a", "b")),
        ({"prompt": "… <think>\nWe", "continued": "<think>\nWe"}, "ll</think>b", ("ll", "b")),
        ({"prompt": "… <think>\nWe</think>It", "continued": "<think>\nWe</think>It"}, " is", ("", " is")),
        ({"prompt": "… It", "continued": "It"}, " is", ("", " is")),
    ],
)
def test_the_prompt_says_where_an_answer_begins(
    kind: type[ReasoningParser], context: dict[str, str], text: str, expected: Parts
) -> None:
    assert read(kind, text, **context) == expected


def test_tags_that_a_user_wrote_say_nothing() -> None:
    prompt = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert read(Qwen3, "A tag.", prompt=prompt) == ("", "A tag.")
    assert read(DeepSeekR1, "A tag.", prompt=prompt.replace("<think>", "</think>")) == ("A tag.", "")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([Qwen3, DeepSeekR1]),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "\n", " ", "a", "think>"]), max_size=15),
    st.data(),
)
def test_any_text_in_any_cut(kind: type[ReasoningParser], parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = read(kind, text)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:stop] for start, stop in zip((0, *places), (*places, len(text)), strict=True)]
    assert run(kind, *pieces) == whole


@pytest.mark.advisory("CVE-2025-48887")
@pytest.mark.parametrize("kind", [Qwen3, DeepSeekR1])
@pytest.mark.parametrize("unit", ["<", "\n", " ", "<think>", "</think>", "<think>\n</think>", "</thin", "\n<"])
def test_work_grows_with_the_text_and_no_faster(kind: type[ReasoningParser], unit: str) -> None:
    def cost(size: int, step: int) -> int:
        text = unit * (size // len(unit))
        return work(lambda: run(kind, *(text[at : at + step] for at in range(0, len(text), step))))

    for size, step in ((1024, 1), (4096, 64), (4096, 1 << 20)):
        assert cost(2 * size, step) < 2.3 * cost(size, step) + 200
    thoughts, content = run(kind, unit * ((1 << 17) // len(unit)))
    assert len(thoughts) + len(content) >= (1 << 17) - 100 * len(unit) or unit == "\n"
