"""`opt`: a dataclass field that is also a command-line option.

Sections are dataclasses and not pydantic models. Most of the code around them reads four sources by exact names and
reports errors in terms of options; pydantic's errors would have to be translated into that. The launcher does not
import pydantic: importing it alone takes longer than `ferrule --help` as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The description of a field for the parser, the help and the reference page.

    An option *works* unless one of three marks is set: `inert`, the reason why it is accepted without effect;
    `replaced`, the option string that gets its value; or `missing`, the feature that is not in this build. Whatever the
    mark, the default and the values in `accepted` are accepted without a notice.
    """

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
    lower: bool = False  # upper case means the same
    bare: bool = False  # the value may be left out; the bare option is the empty text
    optional_value: bool = False  # a boolean that also takes true or false
    secret: bool = False  # never printed
    opens: tuple[str, ...] = ()  # texts that mean the default, "auto"
    foreign: tuple[str, ...] = ()  # of these, the names of what vLLM has and Ferrule does not: a notice says so
    scalar: str | None = None  # a JSON object that may be written as the number of this key
    key_values: bool = False  # a JSON object that may be written as a=1,b=2
    keyed: bool = False  # a JSON object whose entries may be written one by one, as KEY=JSON
    objects: bool = False  # a text that may be given as an object, of which it is the JSON
    suffixes: Mapping[str, str] = field(default_factory=dict)  # word behind a colon of the value → option string
    aliases: tuple[str, ...] = ()  # further option strings, "-q"
    env: str | None = None  # the field of `Environment` that fills it when nothing else does
    server: bool = False  # means nothing without an HTTP server
    common: bool = False  # shown by a plain --help
    inert: str = ""  # why it is accepted without effect
    replaced: str = ""  # the option string that gets its value
    renamed: Mapping[str, str] = field(default_factory=dict)  # value → value for the option that replaces it
    missing: str = ""  # the feature that is not in this build: another value stops the start
    accepted: tuple[Any, ...] = ()  # values that are accepted like the default

    @property
    def standing(self) -> str:
        """The option's class: works, without effect, replaced, or not in this build."""
        found = {"without effect": self.inert, "replaced": self.replaced, "not in this build": self.missing}
        return next((name for name, holds in found.items() if holds), "works")


def opt(default: Any, doc: str, **meta: Any) -> Any:
    """Declare an option. `meta` are the fields of `Option`."""
    metadata = {_KEY: Option(doc=doc, **meta)}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field[Any]) -> Option:
    """Return the `Option` of a field made by `opt`."""
    option = field.metadata[_KEY]
    if not isinstance(option, Option):
        raise TypeError(f"{field.name} was not declared with opt")
    return option
