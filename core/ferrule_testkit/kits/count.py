"""Counts work instead of measuring time, so that results are the same on every machine, however busy it is.

A line of Python counts one. A search in a string counts the string's length, a search with a regular expression or a
parse of JSON or Python the longest string that the calling code can see; one that says where to begin counts one. So a
parser that searches all of its text again for every delta is detected, whether the search runs in Python or in C.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

_SEARCHING = frozenset({"find", "index", "count", "partition", "split", "replace", "rfind", "rpartition", "rindex"})
_CALL = dis.opmap["CALL"]
_PARSERS = {"json.decoder": {"raw_decode"}, "ast": {"parse", "literal_eval"}}


def work(function: Callable[[], Any]) -> int:
    """Return how much work `function` does, counted as the module describes."""
    count = _Count()
    tracing, profiling = sys.gettrace(), sys.getprofile()
    sys.setprofile(count.profile)
    sys.settrace(count.trace)
    try:
        function()
    finally:
        sys.settrace(tracing)
        sys.setprofile(profiling)
    return count.total


class _Count:
    def __init__(self) -> None:
        self.total = 0
        self._bytecode: dict[CodeType, bytes] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.total += 1
        return self.trace

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code.co_name in _PARSERS.get(frame.f_globals.get("__name__", ""), ()):
                self.total += _longest(frame)
        elif event == "c_call" and self._arguments(frame) < 2:
            owner = getattr(argument, "__self__", None)
            if isinstance(owner, str) and argument.__name__ in _SEARCHING:
                self.total += len(owner)
            elif isinstance(owner, re.Pattern):
                self.total += _longest(frame)

    def _arguments(self, frame: FrameType) -> int:
        """Return how many arguments the call at the frame's current instruction has; 1 where the instruction does not
        say.
        """
        code = self._bytecode.get(frame.f_code)
        if code is None:
            code = self._bytecode[frame.f_code] = frame.f_code.co_code
        at = frame.f_lasti
        return code[at + 1] if 0 <= at < len(code) - 1 and code[at] == _CALL else 1


def _longest(frame: FrameType) -> int:
    """Return the length of the longest string among a frame's variables and the attributes of its object."""
    values = list(frame.f_locals.values())
    owner = frame.f_locals.get("self")
    values += getattr(owner, "__dict__", {}).values()
    slots = [name for base in type(owner).__mro__ for name in _slots(base)]
    values += [getattr(owner, name, None) for name in slots]
    return max((len(value) for value in values if isinstance(value, str)), default=0)


def _slots(base: type) -> Iterable[str]:
    found = vars(base).get("__slots__", ())
    return (found,) if isinstance(found, str) else found
