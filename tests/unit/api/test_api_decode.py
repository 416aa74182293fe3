"""Bodies of any bytes: a value or a RequestError, never anything else, and never a value repeated."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
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


# ------------------------------------------------------------------------------------------ unknown fields


class Leaf(msgspec.Struct):
    size: int | None = None


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str | None = None


class Image(msgspec.Struct, tag_field="type", tag="image"):
    leaf: Leaf | None = None


class Tree(msgspec.Struct):
    leaf: Leaf | None = None
    leaves: list[Leaf] | None = None
    parts: list[Text | Image] | None = None
    child: Tree | None = None
    free: dict[str, Any] | None = None
    count: Annotated[int, msgspec.Meta(ge=0)] | None = None


@pytest.mark.parametrize(
    ("body", "unknown"),
    [
        ({}, ()),
        ({"leaf": {"size": 1}, "leaves": [{"size": 1}], "free": {"any": {"thing": 1}}, "count": 3}, ()),
        ({"lef": 1, "leaf": {"sise": 1}}, ("lef", "leaf.sise")),
        ({"leaves": [{}, {"x": 1}, {"size": None, "y": 1}]}, ("leaves[1].x", "leaves[2].y")),
        ({"parts": [{"type": "text", "text": ""}, {"type": "image", "leaf": {"z": 1}}]}, ("parts[1].leaf.z",)),
        ({"parts": [{"type": "text", "texts": ""}]}, ("parts[0].texts",)),
        ({"child": {"child": {"child": {"leaf": None, "chilt": 1}}}}, ("child.child.child.chilt",)),
        ({"é\n": 1}, ("??",)),
        ({f"x{number}": 1 for number in range(100)}, tuple(f"x{number}" for number in range(16))),
    ],
)
def test_unknown_fields_at_any_depth(body: dict[str, Any], unknown: tuple[str, ...]) -> None:
    raw = json.dumps(body).encode()
    assert BodyDecoder(Tree).decode(raw, scan_whole(raw, 64))[1] == unknown


def test_known_are_the_names_at_any_depth() -> None:
    assert BodyDecoder(Tree).known == {
        *("leaf", "leaves", "parts", "child", "free", "count", "size", "text", "type"),
    }


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"count": 1}', ""),
        (b'{"count": 1, "count": 2}', "count"),
        (b'{"free": {"b": {"a": 1, "a": 2}}, "leaf": null, "leaf": null}', "a,leaf"),
        (b'{"free": {"a\\n": 1, "a\\n": 2}}', "a?"),
    ],
)
def test_repeated_fields_are_logged_and_the_last_counts(
    body: bytes, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    value, _ = BodyDecoder(Tree).decode(body, scan_whole(body, 64))
    assert value.count == (2 if names == "count" else 1 if b"count" in body else None)
    said = [dict(record.__dict__["ferrule_fields"]) for record in caplog.records]
    assert said == ([{"fields": names}] if names else [])


def test_many_repeated_fields_take_linear_time() -> None:
    body = b"{" + b",".join(b'"%d":1' % (number % 5000) for number in range(8000)) + b"}"
    BodyDecoder(Tree).decode(body, scan_whole(body, 64))
