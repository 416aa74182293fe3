"""Calls that are hard to parse: a parser's own samples with another name or other arguments."""

from __future__ import annotations

import json
from typing import Any

from ferrule_testkit.kits.base import promise, shown

# JSON texts of arguments. What they mean is for `strict_json` to say.
HOSTILE_ARGUMENTS = (
    r'{"a": "a \\ backslash, a \"quote\", it\'s \/ \u0041\n"}'.replace(r"\'", "'"),
    r'{"a": "a pair \ud83d\ude00, a lone \ud800 and \udc00"}',
    r'{"a": 1e999, "b": -1e999}',
    r'{"a \"b\\": {"c": "}]"}}',
)
NOT_NUMBERS = '{"a": NaN, "b": [-Infinity], "c": Infinity}'  # as Python writes them; JSON has none of them
HOSTILE_NAME = 'get"it\\A'
HOSTILE_NAME_WRITTEN = r'"get\"it\\\u0041"'


def strict_json(text: str, place: str) -> Any:
    """Return the value of a JSON text that UTF-8 can hold, without Python's additions. Raises Broken."""
    try:
        text.encode()
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return promise(False, f"{place}: {shown(text)} is not JSON that UTF-8 can hold")


def exchanged(text: str, old: str, new: str) -> str | None:
    """Return the text with payload `new` instead of `old`; None unless `old` occurs exactly once, as it was written."""
    return text.replace(old, new) if old and text.count(old) == 1 else None


def escaped(name: str) -> str:
    """Write a name as a JSON string, its first character escaped."""
    return f'"\\u{ord(name[0]):04x}{json.dumps(name[1:])[1:]}'


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
