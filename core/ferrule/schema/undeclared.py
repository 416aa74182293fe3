"""Fields of a body that its models do not declare. FastAPI validates, and the models report here what they leave
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

from ferrule.errors import nearest
from ferrule.schema.keys import printable
from ferrule.schema.values import problem

_MAX_NAMED = 16  # fields that are named


class Undeclared:
    """A collection of the fields of one JSON value that no model declares. With `refuses`, models raise instead."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.value: Any = None  # the whole value, which places are told of
        self._found: dict[int, tuple[dict[str, Any], list[str]]] = {}  # by the identity of an object in it

    def add(self, item: dict[str, Any], names: list[str]) -> None:
        """Note fields that an object inside the value has, and its model does not declare."""
        self._found[id(item)] = item, names

    @property
    def places(self) -> tuple[str, ...]:
        """The first few undeclared fields as places such as ``a.b[2].c``, fit to be shown."""
        return tuple(islice(self._places(self.value, ""), _MAX_NAMED)) if self._found else ()

    def _places(self, value: Any, place: str) -> Iterator[str]:
        if isinstance(value, dict):
            _, unknown = self._found.get(id(value), (value, ()))
            for name, item in value.items():
                path = f"{place}.{name}" if place else name
                if name in unknown:
                    yield printable(path)
                elif isinstance(item, dict | list):
                    yield from self._places(item, path)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, dict | list):
                    yield from self._places(item, f"{place}[{number}]")


_telling: ContextVar[Undeclared | None] = ContextVar("undeclared", default=None)


@contextmanager
def telling(undeclared: Undeclared) -> Iterator[None]:
    """Have models report fields that they leave out to `undeclared`, for the length of a block.

    Models find `undeclared` in a context variable, because FastAPI calls the models and passes nothing on to them.
    """
    token = _telling.set(undeclared)
    try:
        yield
    finally:
        _telling.reset(token)


def tell_undeclared(item: dict[str, Any], declared: frozenset[str]) -> None:
    """Report the fields of an object that are not `declared`. With `refuses`, raises what makes pydantic refuse it."""
    if item.keys() <= declared or (told := _telling.get()) is None:
        return
    unknown = [name for name in item if name not in declared]
    if told.refuses:
        raise _refusal(unknown, declared)
    told.add(item, unknown)


def _refusal(unknown: list[str], declared: frozenset[str]) -> Exception:
    others = ", ".join(printable(name) for name in unknown[1:_MAX_NAMED])
    so = f", and so is {others}" if others else ""
    meant = nearest(unknown[0][:64], declared)
    return problem(f"is unknown{so}.{meant} The server runs with --strict-requests", unknown[0])
