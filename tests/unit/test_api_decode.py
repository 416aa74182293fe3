"""Bodies of any bytes: a value or a RequestError, never anything else, and never a value repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule.api.decode import MAX_COST, BodyDecoder, JsonScan, explain, scan_whole
from ferrule.errors import RequestError
from ferrule_plugins.router.openai_schema import ChatBody, CompletionBody

DECODERS = [BodyDecoder(CompletionBody), BodyDecoder(ChatBody)]
NAMES = sorted(DECODERS[0].known | DECODERS[1].known)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), values, max_size=5)


def decode(body: bytes) -> None:
    for decoder in DECODERS:
        found: RequestError | None = None
        try:
            decoder.decode(body, scan_whole(body, 64))
        except RequestError as error:
            found = error
        assert found is None or (len(found.message) < 300 and found.message.isascii())


@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    decode(body)


@given(bodies)
def test_any_json_of_known_fields(body: dict[str, Any]) -> None:
    decode(json.dumps(body).encode())


@given(bodies, st.integers(0, 400), st.binary(max_size=3))
def test_damaged_json(body: dict[str, Any], place: int, junk: bytes) -> None:
    text = json.dumps(body).encode()
    decode(text[:place] + junk + text[place + len(junk) :])


@pytest.mark.parametrize(
    ("finding", "message", "param"),
    [
        ("Expected `int | null`, got `str` - at `$.n`", "n must be an integer, not a string.", "n"),
        ("Expected `int` <= 5 - at `$.a[2].b`", "a[2].b must be an integer <= 5.", "a[2].b"),
        ("Expected `float`, got `null` - at `$.d[...]`", "d must be a number, not null.", "d"),
        ("Expected `str | array | null`, got `int` - at `$.p`", "p must be a string or a list, not an integer.", "p"),
        ("Object missing required field `x`", "x is required.", "x"),
        ("Object missing required field `x` - at `$.a`", "a.x is required.", "a.x"),
        ("Expected `object`, got `array`", "The body must be an object, not a list.", None),
        ("Number out of range - at `$.f`", "f is a number out of range.", "f"),
        ("Invalid enum value 'secret' - at `$.f`", "f has a value that is not allowed.", "f"),
    ],
)
def test_wording(finding: str, message: str, param: str | None) -> None:
    error = explain(finding)
    assert (error.message, error.param) == (message, param)


def test_scanning_takes_linear_time() -> None:
    """Shapes that invite backtracking, at a size at which anything more than linear would not end."""
    for unit in (b'\\"[', b'"', b'"a', b"\\", b"[]", b'"\\', b"1", b"1e", b"-", b'{"":'):
        scan = JsonScan(max_depth=1 << 30)
        body = b'{"prompt":"' + unit * 1_000_000
        try:
            for start in range(0, len(body), 1 << 16):
                scan.feed(body[start : start + (1 << 16)])
        except RequestError:
            continue


def test_values_are_counted() -> None:
    scan = JsonScan(max_depth=64)
    scan.feed(b"[" + b"1," * (MAX_COST - 100))
    with pytest.raises(RequestError, match="too many"):
        scan.feed(b"1," * 200)
