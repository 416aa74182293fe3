"""Decodes a large JSON text piece by piece, so that other requests get their turns between the pieces.

A decoder in C holds the interpreter until it is done: 280 ms for four million numbers. The text is therefore cut: an
object into its fields, a list into its items, and lists of numbers and long strings into runs.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import msgspec

PIECE = 1 << 16  # bytes that are decoded at once
_FIELDS = 1000  # of an object, that are decoded at once

Text = bytes | bytearray | msgspec.Raw
Turns = Generator[None, None, Any]

_plain: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_INNER = re.compile(rb'["\[{]')
_SPACE = re.compile(rb"[ \t\n\r]*+")
# Where a string may be cut: behind twelve bytes without a backslash, which are outside any escape, and before a whole
# character; or before an escape, unless it may be the second half of a surrogate pair.
_CUT = re.compile(rb"[^\\]{12}(?=[\x00-\x7f\xc0-\xff])|[^\\](?=\\(?:[^u]|u(?:[^dD]|[dD][^c-fC-F])))", re.DOTALL)
_WHOLE = re.compile(rb"(?:[^\\]++|\\.)*+", re.DOTALL)  # characters and escapes, of which none is cut


def decode_in_turns(text: Text) -> Turns:
    """Decode a text as a generator that yields between two pieces and returns the value.

    Raises what msgspec's decoder raises.
    """
    start = _begin(text)
    first = bytes(memoryview(text)[start : start + 1])
    if len(memoryview(text)) <= PIECE:
        return _plain.decode(text)
    if first == b"{":
        return (yield from _object(text))
    if first == b"[":
        return (yield from _list(text))
    if first == b'"' and not start:
        return (yield from _string(text))
    return _plain.decode(text)


def _object(text: Text) -> Turns:
    found: dict[str, Any] = {}
    for number, (name, raw) in enumerate(_fields.decode(text).items(), 1):
        found[name] = yield from decode_in_turns(raw)
        if not number % _FIELDS:
            yield
    return found


def _list(text: Text) -> Turns:
    if (yield from _is_flat(text)):
        return (yield from _numbers(text))
    found: list[Any] = []
    group: list[msgspec.Raw] = []
    size = 0
    for raw in _items.decode(text):
        length = len(memoryview(raw))
        if size + length > PIECE:
            found += _plain.decode(b"[%b]" % b",".join(group))
            group, size = [], 0
            yield
        if length > PIECE:
            found.append((yield from decode_in_turns(raw)))
        else:
            group.append(raw)
            size += length + 1
    found += _plain.decode(b"[%b]" % b",".join(group))
    return found


def _is_flat(text: Text) -> Generator[None, None, bool]:
    """Return whether a list contains no strings, lists and objects, yielding now and then."""
    start, end = _begin(text) + 1, len(memoryview(text))
    for place in range(start, end, 1 << 20):
        if _INNER.search(text, place, min(end, place + (1 << 20))):
            return False
        yield
    return True


def _begin(text: Text) -> int:
    """Return the index at which the value begins, behind white space."""
    match = _SPACE.match(text)
    return match.end() if match else 0


def _numbers(text: Text) -> Turns:
    """Decode a list of numbers, booleans and nulls in runs."""
    found: list[Any] = []
    view = memoryview(text)
    start, comma = _begin(text) + 1, re.compile(b",")
    while cut := comma.search(text, min(start + PIECE, len(view)), min(start + 2 * PIECE, len(view))):
        piece = _plain.decode(b"".join((b"[", view[start : cut.start()], b"]")))
        if not piece:
            raise msgspec.DecodeError("a list with a comma and no value before it")
        found += piece
        start = cut.end()
        yield
    rest = _plain.decode(b"".join((b"[", view[start:])))
    if found and not rest:
        raise msgspec.DecodeError("a list with a comma and no value behind it")
    return found + rest


def _string(text: Text) -> Turns:
    """Decode a string without white space before it in runs."""
    view = memoryview(text)
    parts: list[str] = []
    start, end = 1, len(view) - 1
    while start + PIECE < end and (cut := _cut(text, start, end)):
        parts.append(_plain.decode(b"".join((b'"', view[start:cut], b'"'))))
        start = cut
        yield
    parts.append(_plain.decode(b"".join((b'"', view[start:]))))
    return "".join(parts)


def _cut(text: Text, start: int, end: int) -> int:
    """Return an index at which to cut a string, or 0 when none is found.

    The rest of the string begins at `start`, where an escape may begin.
    """
    if cut := _CUT.search(text, start + PIECE, min(start + 2 * PIECE, end)):
        return cut.end()
    whole = _WHOLE.match(text, start, start + PIECE)  # in a run of backslashes only their count tells
    place = whole.end() if whole else 0
    return place if bytes(memoryview(text)[place - 2 : place]) == b"\\\\" and place > start + 1 else 0
