"""In which form a template reads the content of messages, and what of a conversation it does not show.

Both are found by running the template on messages that hold marks, because its syntax does not tell: content goes
through macros, other names, filters and `get`, and each role may be read in another way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

Run = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""The text of some messages; None where the template fails."""

_SECONDS = 0.5  # for finding out: a template that is slow is asked less
_MARKS = ("zq0x0qz", "zq0x1qz")
_MARK = re.compile(r"zq\d+x\d+qz")
_QUOTED = re.compile(r"""text\\?['"] ?: ?\\?['"]zq""")  # a part of content that is shown as data
_SURE = 16  # characters of a text that stands in the prompt by chance no more
_MAX_UNSURE = 4  # texts that are looked for in vain, before all others count as unsure
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_time", "arguments": {"city": "Rome"}}}
_RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_time"}


class Fit(Struct, frozen=True):
    """A template's way of reading content. `forms`: role → "string", "openai" (parts), "part" (one part), or "given"
    (text or parts, as they come). `user` is always in it, and stands for roles that are not. `null`: content beside
    calls may be none.
    """

    forms: dict[str, str]
    null: bool = False

    def form(self, role: str) -> str:
        return self.forms.get(role, self.forms["user"])

    def of_all(self, form: str) -> Fit:
        """Return the same fit with one form for all roles, as an operator or a request wants it."""
        return Fit({"user": form}, self.null)


def find_fit(run: Run, roles: Iterable[str] = ()) -> Fit:
    """Run a template on short conversations. `roles`: others that begin one as a system message does.

    The user's form is found first, since every conversation needs one. A role that is not shown in any form is read as
    the user's messages are.
    """
    end = time.monotonic() + _SECONDS
    forms = {"user": _form(run, "user", (), ()) or "string"}
    user = {"role": "user", "content": shaped("Hello", forms["user"])}
    for role in ("assistant", "system", *roles):
        before = (user,) if role == "assistant" else ()
        if time.monotonic() < end and (found := _form(run, role, before, (user,))):
            forms[role] = found
    calling: dict[str, Any] = {"role": "assistant", "content": shaped("", forms["user"]), "tool_calls": [_CALL]}
    if time.monotonic() < end and (found := _form(run, "tool", (user, calling), ())):
        forms["tool"] = found
    null = time.monotonic() < end and _takes_null(run, user, calling)
    return Fit(forms, null)


def _form(run: Run, role: str, before: Sequence[Any], after: Sequence[Any]) -> str | None:
    message = {**_RESULT, "role": role} if role == "tool" else {"role": role}

    def shows(content: Any, count: int) -> bool:
        text = run([*before, {**message, "content": content}, *after])
        return text is not None and _QUOTED.search(text) is None and _found(text) >= set(_MARKS[:count])

    parts = [_part(mark) for mark in _MARKS]
    as_parts = shows(parts, 2)
    if shows(_MARKS[0], 1):
        return "given" if as_parts else "string"
    if as_parts:
        return "openai"
    return "part" if shows(parts[:1], 1) else None


def _takes_null(run: Run, user: Mapping[str, Any], calling: Mapping[str, Any]) -> bool:
    """Return whether None as content neither fails nor is written as a word, where an empty text is not."""
    result = {**_RESULT, "content": "12:00"}
    null, empty = run([user, {**calling, "content": None}, result]), run([user, calling, result])
    if null is None:
        return False
    return empty is None or all(null.count(word) <= empty.count(word) for word in ("None", "null"))


def shaped(content: Any, form: str) -> Any:
    if form in ("string", "part") and isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    if form in ("openai", "part") and isinstance(content, str):
        return [_part(content)] if content else []
    return content


def find_lost(run: Run, messages: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """Return the parts of some messages, in the form that they were rendered in, that their `text` does not show.

    A long content that stands in the text is shown. Uncertain contents are decided by a second run, in which contents
    and the names of called functions are marks. Where the template fails on those, nothing is known.
    """
    unsure = _unsure(messages, text)
    shown = run([_marked(message, number) for number, message in enumerate(messages)]) if unsure else None
    if shown is None:
        return []
    found, lost = _found(shown), []
    for number in unsure:
        marked = _marked(messages[number], number)
        names = {call["function"]["name"] for call in marked.get("tool_calls") or ()}
        if not found >= {mark for each in _texts(marked["content"]) for mark in _MARK.findall(each)}:
            lost.append(f"messages[{number}].content")
        if not found >= names:
            lost.append(f"messages[{number}].tool_calls")
    return lost


def _unsure(messages: Sequence[Mapping[str, Any]], text: str) -> list[int]:
    """Return the numbers of messages that are not certainly in the text. Most contents are looked for where the one
    before ends.
    """
    unsure, place, misses = [], 0, 0
    for number, message in enumerate(messages):
        sure = not message.get("tool_calls")
        for each in filter(None, map(str.strip, _texts(message["content"]))):
            found = text.find(each, place) if misses < _MAX_UNSURE and len(each) >= _SURE else -1
            misses += found < 0 and len(each) >= _SURE
            place = max(place, found + len(each)) if found >= 0 else place
            sure = sure and found >= 0
        if not sure:
            unsure.append(number)
    return unsure


def _marked(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    content, marked = message["content"], dict(message)
    if isinstance(content, str):
        marked["content"] = _mark(number, 0) if content.strip() else content
    elif content:
        marked["content"] = [
            {**part, "text": _mark(number, place)} if part["text"].strip() else part
            for place, part in enumerate(content)
        ]
    if calls := message.get("tool_calls"):
        first = len(content) if isinstance(content, list) else 1
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _mark(number, place)}}
            for place, call in enumerate(calls, first)
        ]
    return marked


def _mark(number: int, place: int) -> str:
    return f"zq{number}x{place}qz"


def _found(text: str) -> set[str]:
    return set(_MARK.findall(text.lower()))


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content or ()]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
