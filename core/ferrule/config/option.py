"""`opt`: a dataclass field that is also a command-line option."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the parser, the help and the reference page know of a field."""

    doc: str
    choices: tuple[Any, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    kind: str | None = None  # the plugin kind whose names are the choices
    nargs: str | None = None  # "+": one option, several values
    append: bool = False  # repeatable
    json: bool = False  # takes a JSON text, or dotted keys
    human: bool = False  # takes 1k, 1K, 25.6k …
    bare: bool = False  # the value may be left out; the bare option is the empty text
    optional_value: bool = False  # a boolean that also takes true or false
    secret: bool = False  # never printed
    aliases: tuple[str, ...] = ()  # further option strings, "-q"
    env: str | None = None  # the field of `Environment` that fills it when nothing else does
    server: bool = False  # means nothing without an HTTP server
    common: bool = False  # shown by a plain --help


def opt(default: Any, doc: str, **meta: Any) -> Any:
    """Declare an option. `meta` are the fields of `Option`."""
    metadata = {_KEY: Option(doc=doc, **meta)}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field[Any]) -> Option:
    """The `Option` of a field made by `opt`."""
    option = field.metadata[_KEY]
    if not isinstance(option, Option):
        raise TypeError(f"{field.name} was not declared with opt")
    return option
