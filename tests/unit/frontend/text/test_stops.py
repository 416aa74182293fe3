"""Stop strings: the same answer for every cut of the text, equal to a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.frontend.text.stops import StopMatcher, StopStrings


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search the whole text at once: the first end of any stop string, then the request's order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(StopStrings(stops), include)
    given_out = []
    for piece in pieces:
        given_out.append(matcher.feed(piece))
        if matcher.matched is not None:
            return "".join(given_out), matcher.matched, given_out
    given_out.append(matcher.finish())
    return "".join(given_out), None, given_out


words = st.text(alphabet="ab\n", min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12), st.lists(words, min_size=1, max_size=4), st.booleans()
)
def test_every_cut_gives_the_oracle_s_answer(pieces: list[str], stops: list[str], include: bool) -> None:
    text, matched, _ = run(pieces, stops, include)
    assert (text, matched) == oracle("".join(pieces), stops, include)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab", max_size=14), st.lists(words, min_size=1, max_size=3), st.data())
def test_exhaustive_cuts_of_short_texts(text: str, stops: list[str], data: st.DataObject) -> None:
    bits = data.draw(st.integers(0, 2 ** max(0, len(text) - 1) - 1))
    pieces, start = [], 0
    for position in range(1, len(text)):
        if bits >> (position - 1) & 1:
            pieces.append(text[start:position])
            start = position
    pieces.append(text[start:])
    assert run(pieces, stops)[:2] == oracle(text, stops, False)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(StopStrings(["</s>", "\n\nUser:"]))
    assert matcher.feed("Hello <") == "Hello "
    assert matcher.feed("b> \n") == "<b> "
    assert matcher.feed("\nUs") == ""
    assert matcher.feed("ers\n") == "\n\nUsers"
    assert matcher.feed("\nUser: x") == ""
    assert matcher.matched == "\n\nUser:"


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "text", "matched"),
    [
        (["ab", "c", "d"], ["abc", "bc"], False, "", "abc"),
        (["ab", "c", "d"], ["bc", "abc"], False, "a", "bc"),
        (["abcd"], ["cd", "b"], False, "a", "b"),
        (["abcd"], ["cd", "b"], True, "ab", "b"),
        (["aab"], ["aab"], True, "aab", "aab"),
        (["aa", "ab"], ["aab"], False, "a", "aab"),
        (["x🙂", "y"], ["🙂y"], False, "x", "🙂y"),
        (["ab"], ["abc"], False, "ab", None),
    ],
)
def test_examples(pieces: list[str], stops: list[str], include: bool, text: str, matched: str | None) -> None:
    assert run(pieces, stops, include)[:2] == (text, matched)


def test_work_is_linear_for_the_worst_strings() -> None:
    """Match 64 strings of 1 KiB that nearly match: each character costs at most two steps per string, amortised."""
    stops = ["a" * 1000 + str(number) for number in range(64)]
    matcher = StopMatcher(StopStrings(stops))
    out = "".join(matcher.feed("a" * 4) for _ in range(1000))
    assert len(out) == 3000
    assert matcher.feed("b") == "a" * 1000 + "b"
