"""Bodies of any bytes: a value or a RequestError, never anything else, and never a value repeated."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ferrule.api.json_body import JsonScan, decode
from ferrule.errors import RequestError
from ferrule.schema import Body, Int, Strict, Undeclared, refusal_of, shaped
from ferrule.schema.undeclared import telling
from ferrule_plugins.router.openai.schema import ChatBody, CompletionBody

KINDS = [CompletionBody, ChatBody]
NAMES = sorted({name for kind in KINDS for name in kind.model_fields})

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), values, max_size=5)


def check(body: bytes) -> None:
    """Check for a value or a RequestError, from the frame or from the body's model."""
    for kind in KINDS:
        found: RequestError | None = None
        try:
            value = decode(body, 64)
            undeclared = Undeclared()
            undeclared.value = value
            with telling(undeclared):
                kind.model_validate(value)
            assert len(undeclared.places) <= 16
        except ValidationError as error:
            found = refusal_of(error, given=value)
        except RequestError as error:
            found = error
        assert found is None or (len(found.message) < 700 and found.message.isascii())


@given(st.binary(max_size=200))
@example(b'{"a": 1e999, "\x80": 1}')
@example(b'{"a": 1e999, "b": "\x80"}')
@example(b'{"a": 1e999')
@example(b'{"a": 1e999, "\x80": "' + b"x" * (1 << 20) + b'"}')
def test_any_bytes(body: bytes) -> None:
    check(body)


@given(bodies)
def test_any_json_of_known_fields(body: dict[str, Any]) -> None:
    check(json.dumps(body).encode())


@given(bodies, st.integers(0, 400), st.binary(max_size=3))
def test_damaged_json(body: dict[str, Any], place: int, junk: bytes) -> None:
    text = json.dumps(body).encode()
    check(text[:place] + junk + text[place + len(junk) :])


class Inner(BaseModel):
    b: Int | None = None
    day: date | None = None
    price: Decimal | None = None


class Outer(BaseModel):
    """A model as a stranger may write it: without Ferrule's base, and with unions without a discriminator."""

    model_config = ConfigDict(strict=True)

    n: int | None = None
    size: int = Field(1, le=5)
    a: list[Inner] = []
    d: dict[str, float] = {}
    p: str | list[str | int | list[int]] = ""
    either: Inner | list[Inner] | None = None
    f: Literal["x", "y"] = "x"
    even: Annotated[int, AfterValidator(lambda value: value if value % 2 == 0 else raise_("Send an even one."))] = 0


def raise_(text: str) -> int:
    raise ValueError(text)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"n": "secret"}, "n must be an integer, not a string.", "n"),
        ({"n": True}, "n must be an integer, not a boolean.", "n"),
        ({"size": 9}, "size must be at most 5.", "size"),
        ({"a": [{}, {"b": "secret"}]}, "a[1].b must be an integer, not a string.", "a[1].b"),
        ({"d": {"x": None}}, "d.x must be a number, not null.", "d.x"),
        ({"p": 3}, "p must be a string or a list, not an integer.", "p"),
        ({"p": ["a", 1, {}]}, "p[2] must be a string or an integer or a list, not an object.", "p[2]"),
        ({"p": [[1, "secret"]]}, "p[0][1] must be an integer, not a string.", "p[0][1]"),
        ({"either": {"b": []}}, "either.b must be an integer, not a list.", "either.b"),
        ({"either": [{"b": {}}]}, "either[0].b must be an integer, not an object.", "either[0].b"),
        ({"f": "secret"}, "f must be one of 'x', 'y'.", "f"),
        ({"even": 1}, "even is not valid: Send an even one.", "even"),
        ([], "The body must be an object, not a list.", None),
    ],
)
def test_wording(body: Any, message: str, param: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(body)
    error = refusal_of(caught.value, given=body)
    assert (error.message, error.param) == (message, param)


def test_scanning_takes_linear_time() -> None:
    """Scan shapes that invite backtracking, at a size at which anything more than linear would not end."""
    for unit in (b'\\"[', b'"', b'"a', b"\\", b"[]", b'"\\', b"1", b"1e", b"-", b'{"":'):
        scan = JsonScan(max_depth=1 << 30)
        body = b'{"prompt":"' + unit * 1_000_000
        try:
            for start in range(0, len(body), 1 << 16):
                scan.feed(body[start : start + (1 << 16)])
        except RequestError:
            continue


@pytest.mark.parametrize(("item", "cost"), [(b"1,", 1), (b'"a",', 9), (b'"\\"",', 9), (b"{},", 9)])
def test_values_are_counted(item: bytes, cost: int) -> None:
    scan = JsonScan(max_depth=64, max_values=100_000)
    scan.feed(b"[" + item * ((100_000 - 100) // cost))
    with pytest.raises(RequestError, match="too many"):
        scan.feed(item * 200)


# ------------------------------------------------------------------------------------------ unknown fields


class Leaf(Strict):
    size: int | None = None


class Part(Strict):
    type: Literal["text"]
    text: str | None = None


class Image(Strict):
    type: Literal["image"]
    leaf: Leaf | None = None


class Free(Strict):
    """A model that keeps what is not declared, as pydantic has it."""

    model_config = ConfigDict(extra="allow")

    leaf: Leaf | None = None


class Foreign(BaseModel):
    """A model without Ferrule's base: pydantic leaves out what it does not declare, and nobody is told."""

    leaf: Leaf | None = None


class Tree(Body):
    leaf: Leaf | None = None
    leaves: list[Leaf] | None = None
    parts: list[Annotated[Part | Image, Field(discriminator="type")]] | None = None
    child: Tree | None = None
    anything: dict[str, Any] | None = None
    named: dict[str, Leaf] | None = None
    kept: Annotated[dict[str, Any], shaped(Leaf)] | None = None
    free: Free | None = None
    foreign: Foreign | None = None
    count: int | None = Field(None, ge=0, alias="how_many")


@pytest.mark.parametrize(
    ("body", "unknown"),
    [
        ({}, ()),
        ({"leaf": {"size": 1}, "leaves": [{"size": 1}], "anything": {"any": {"thing": 1}}, "how_many": 3}, ()),
        ({"named": {"a": {"size": 1}, "b": {"sise": 1}}, "count": 3}, ("named.b.sise", "count")),
        ({"lef": 1, "leaf": {"sise": 1}}, ("lef", "leaf.sise")),
        ({"leaves": [{}, {"x": 1}, {"size": None, "y": 1}]}, ("leaves[1].x", "leaves[2].y")),
        ({"parts": [{"type": "text", "text": ""}, {"type": "image", "leaf": {"z": 1}}]}, ("parts[1].leaf.z",)),
        ({"parts": [{"type": "text", "texts": ""}]}, ("parts[0].texts",)),
        ({"child": {"child": {"child": {"leaf": None, "chilt": 1}}}}, ("child.child.child.chilt",)),
        ({"child": {"nothing": None}}, ("child.nothing",)),
        ({"kept": {"sise": 1}}, ("kept.sise",)),
        ({"free": {"x": 1, "leaf": {"sise": 1}}}, ("free.leaf.sise",)),
        ({"foreign": {"x": 1, "leaf": {"sise": 1}}}, ("foreign.leaf.sise",)),
        ({"é\n": 1}, ("??",)),
        ({f"x{number}": 1 for number in range(100)}, tuple(f"x{number}" for number in range(16))),
    ],
)
def test_undeclared_fields_at_any_depth(body: dict[str, Any], unknown: tuple[str, ...]) -> None:
    told, refused = Undeclared(), Undeclared(refuses=True)
    told.value = refused.value = body
    with telling(told):
        Tree.model_validate(body)
    assert told.places == unknown
    with telling(refused):
        if not unknown:
            Tree.model_validate(body)
            return
        with pytest.raises(ValidationError) as caught:
            Tree.model_validate(body)
    error = refusal_of(caught.value, given=body)
    assert error.param in unknown
    assert "is unknown" in error.message


def test_outside_of_a_request_nobody_is_told() -> None:
    assert Tree.model_validate({"lef": 1}) == Tree()
