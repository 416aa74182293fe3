"""Decodes a body's bytes, which are not trusted, into a JSON value.

A scan comes first and bounds what decoding may cost: nesting, number of values, length of integers. The scan is linear,
runs at the speed of `bytes` methods and can be fed as the bytes arrive.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ferrule.api.json_turns import decode_in_turns
from ferrule.config import LimitsConfig
from ferrule.errors import RequestError
from ferrule.schema import printable

# What a string, list or object costs, in the unit that `max_values` limits; a number costs 1. It bounds the memory that
# decoding may take, and how long a decoder in C may keep the loop, whatever the size of the body.
_COST = 8
_VALUE_BYTES = 40  # that a unit of cost takes as Python's objects: a number with its place in a list
_MAX_BLANK = 1 << 16  # bytes of white space in one place: nobody's layout
_SMALL = 1 << 18  # bytes of a body that is decoded at once
_MAX_NAMED = 1 << 20  # bytes of a body in which the field of a bad number is looked for
_MAX_PLACED = 1 << 16  # bytes of a body in which the whole place of such a number is looked for
_INT_DIGITS = 19  # digits of the largest 64-bit integer
_INT_MAX = (1 << 63) - 1

_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'  # of a string, up to its closing quote
_STRING_REST = re.compile(_REST, re.DOTALL)
_STRING = re.compile(rb'"%b"|"(%b\\?\Z)' % (_REST, _REST), re.DOTALL)  # the group is a string that does not end here
_LONG_INT = re.compile(rb"(?<![\d.eE+])(-?+)(\d{19,}+)(?![.eE])")
_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_RUN = b"0" * _INT_DIGITS  # no integer is too long without so many digits: found much faster than by expression
_NUMBER_TAIL = re.compile(rb"[\d.eE+-]{1,64}\Z")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = frozenset(b"[{")


class JsonScan:
    """A scanner that is fed a body in pieces and raises RequestError as soon as a limit is passed."""

    def __init__(self, max_depth: int, max_values: int = LimitsConfig.max_json_values) -> None:
        self.has_long_int = False  # an integer that does not fit in 64 bits was seen outside strings
        self._max_depth = max_depth
        self._max_values = max_values
        self._num_text = 0  # bytes of strings
        self._num_blank = 0  # bytes of white space that the last pieces ended with, when there was nothing else
        self._width = 1  # bytes that Python may need for a character
        self._depth = 0
        self._cost = 0
        self._num_strings = 0
        self._in_string = False
        self._escaped = False  # the next byte is escaped by a backslash that ended the last piece
        self._tail = b""  # number characters that ended the last piece

    def feed(self, piece: bytes) -> None:
        if b"\\" not in piece and not self._escaped:
            self._feed_plain(piece)
        else:
            self._feed_escaped(piece)
        if self._cost > self._max_values:
            raise RequestError(
                f"The body holds too many values: at most {self._max_values} numbers, of which a string, list or "
                "object counts as eight (--max-json-values)."
            )
        if self._width < 4 and not (piece.isascii() and b"\\u" not in piece):
            self._width = 4

    @property
    def num_bytes(self) -> int:
        """An estimate of the bytes that the decoded value will take in memory."""
        units = self._cost - _COST * self._num_strings // 2  # a string takes half of what it costs
        return units * _VALUE_BYTES + self._num_text * self._width

    def _feed_plain(self, piece: bytes) -> None:
        """Scan a piece without escapes, in which every quotation mark begins or ends a string."""
        parts = piece.split(b'"')
        self._between(b"".join(parts[self._in_string :: 2]), len(piece))
        self._add_strings((len(parts) - self._in_string) // 2)
        self._in_string ^= len(parts) % 2 == 0

    def _feed_escaped(self, piece: bytes) -> None:
        length = len(piece)
        if self._in_string:
            piece = self._after_string(piece)
        parts = _STRING.split(piece)  # what stands between strings, alternating with the group
        self._between(b"".join(parts[::2]), length)
        self._add_strings(len(parts) // 2)
        if len(parts) > 1 and parts[-2] is not None:
            self._after_string(parts[-2])

    def _add_strings(self, count: int) -> None:
        self._num_strings += count
        self._cost += _COST * count

    def _after_string(self, piece: bytes) -> bytes:
        """Skip to the end of the open string, and return the bytes behind it, if any."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        match = _STRING_REST.match(piece)
        place = match.end() if match else 0
        self._in_string = piece[place : place + 1] != b'"'
        self._escaped = self._escaped or piece[place : place + 1] == b"\\"  # the last byte
        return piece[place + 1 :]

    def _between(self, text: bytes, length: int) -> None:
        """Count the text that stands outside strings in a piece of `length` bytes."""
        self._num_text += length - len(text)
        self._num_blank = self._num_blank + length if len(text) == length and text.isspace() else 0
        if self._num_blank > _MAX_BLANK:
            raise RequestError(f"The body has more than {_MAX_BLANK} bytes of white space in one place.")
        self._cost += text.count(b",")
        for byte in text.translate(None, _NOT_BRACKETS):
            if byte in _OPENING:
                self._depth += 1
                self._cost += _COST
                if self._depth > self._max_depth:
                    raise RequestError(f"The body is nested deeper than {self._max_depth} levels.")
            else:
                self._depth -= 1
        text = self._tail + text
        self.has_long_int = self.has_long_int or _exceeds(text)
        tail = _NUMBER_TAIL.search(text, max(0, len(text) - 64))
        self._tail = tail.group() if tail else b""


def _exceeds(text: bytes) -> bool:
    """Return whether a text without strings holds an integer outside 64 bits."""
    if _LONG_RUN not in text.translate(_AS_ZERO):
        return False
    for sign, digits in _LONG_INT.findall(text):
        if len(digits) > _INT_DIGITS or int(digits) > _INT_MAX + bool(sign):
            return True
    return False


_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_UNFIT = object()
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(body: bytes | bytearray, max_depth: int, max_values: int = LimitsConfig.max_json_values) -> Any:
    """Return the value of a whole body. Raises RequestError, whose message never repeats a value from the body.

    A scan is needed only where the body is large, or may be deep or have a large integer: else its cost is none.
    """
    scan = None
    if len(body) > 1 << 16 or body.count(b"[") + body.count(b"{") > max_depth or _LONG_INT.search(body):
        scan = JsonScan(max_depth, max_values)
        scan.feed(bytes(body))
    with _refusing(body, scan):
        return _decoder.decode(body)


async def decode_large(body: bytes | bytearray, scan: JsonScan) -> Any:
    """Return the value of a scanned body as `decode` does, giving other tasks their turns while a large one is
    decoded.
    """
    turns = decode_in_turns(body)
    with _refusing(body, scan):
        if len(body) <= _SMALL:
            return _decoder.decode(body)
        while True:
            try:
                next(turns)
            except StopIteration as end:
                return end.value
            await asyncio.sleep(0)


@contextmanager
def _refusing(body: bytes | bytearray, scan: JsonScan | None) -> Iterator[None]:
    """Raise RequestError for what is wrong with a body that is decoded in the block."""
    try:
        yield
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        if "out of range" in str(error):
            raise _unfit(body) from None
        raise RequestError(_syntax(body)) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    if scan is not None and scan.has_long_int:
        raise _unfit(body)


def _unfit(body: bytes | bytearray) -> RequestError:
    """Name the place of a number that does not fit in 64 bits; in a large body only the field."""
    if len(body) <= _MAX_PLACED:
        try:
            found = json.loads(body, parse_int=_fit_int, parse_float=_fit_float)
        except ValueError:  # what follows the number is not JSON, or not UTF-8
            return RequestError(_syntax(body))
        place = next(_places(found, ""), "")
    elif len(body) > _MAX_NAMED:
        place = ""
    else:
        place = next((printable(name) for name, raw in _fields(body) if _exceeds(_STRING.sub(b"", bytes(raw)))), "")
    what = "integers must fit in 64 bits, and other numbers in a float"
    return RequestError(f"{place}: {what}." if place else f"{what.capitalize()}.", place or None)


def _fields(body: bytes | bytearray) -> Iterable[tuple[str, msgspec.Raw]]:
    try:
        return _raw_fields.decode(body).items()
    except ValueError:  # not an object, or names that are not UTF-8
        return ()


def _fit_int(text: str) -> Any:
    return _UNFIT if _exceeds(text.encode()) else 0


def _fit_float(text: str) -> Any:
    return _UNFIT if math.isinf(float(text)) else 0


def _places(value: Any, place: str) -> Iterator[str]:
    if value is _UNFIT:
        yield place
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _places(item, f"{place}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _places(item, f"{place}.{printable(name)}" if place else printable(name))


def _syntax(body: bytes | bytearray) -> str:
    if not body.strip():
        return "The body is empty; a JSON object is expected."
    if body.startswith(b"\xef\xbb\xbf"):
        return "The body starts with a byte order mark, which JSON does not allow."
    return "The body is not valid JSON (RFC 8259): NaN, Infinity, lone surrogates and comments are not allowed."
