"""What the sections say about options, in the form that the parser, the help and the reference page use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ferrule.config.option import Option, option_of
from ferrule.errors import nearest

_OPPOSITE = {"enable": "disable", "disable": "enable"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One option: a field of a section. `base` is the type of one element; `many` means a tuple of them."""

    section: str  # key of the section, "model"
    group: str  # its title, "ModelConfig"
    name: str  # field name; the key of values and origins
    base: type  # bool, int, float, str or dict
    many: bool
    optional: bool  # takes None
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling that the help shows."""
        negative = ("--no-" + self.flag[2:],) if self.base is bool else ()
        return (*self.option.aliases, self.flag, *negative)

    @property
    def expects(self) -> str:
        """The description of valid values, as it follows the word "expected"."""
        if self.option.choices:
            return "one of: " + ", ".join(str(c) for c in self.option.choices)
        nouns = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a JSON object"}
        noun = "KEY={JSON}" if self.option.keyed else nouns[self.base]
        if self.many and self.option.json:
            noun = 'a JSON list such as ["a", "b"]'
        suffix = " (1k = 1000, 1K = 1024, 25.6k = 25600)" if self.option.human else ""
        return f"{noun} {self.limits}".rstrip() + suffix

    @property
    def limits(self) -> str:
        """The bounds of a number, ">= 1 and <= 4"."""
        bounds = {">=": self.option.ge, ">": self.option.gt, "<=": self.option.le}
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class Match:
    """The meaning of an option string. `path` are the keys after the dots; `append` is a `+` behind the last."""

    spec: Spec
    positive: bool = True  # False: --no-x
    path: tuple[str, ...] = ()
    append: bool = False


@dataclass(frozen=True)
class Item:
    """One value as it was written, not yet converted.

    `raw` is True for an option without a value, a text, a list of texts, or (from YAML and keyword arguments) any other
    object.
    """

    match: Match
    raw: Any
    origin: str  # "command line", "serve.yaml:3", …
    label: str  # how an error names it: "--port", "serve.yaml:3: port", …
    # path of a key in a file's value, () for the value itself → "serve.yaml:4"
    places: Mapping[tuple[str, ...], str] = dataclasses.field(default_factory=dict)


class Schema:
    """The options of some sections. Sections are frozen dataclasses whose fields were made with `opt`."""

    def __init__(self, sections: Mapping[str, type], *, server: bool = True, partial: bool = False) -> None:
        """Collect the options of the sections. Raises TypeError.

        `server=False` leaves out the options that only mean something to an HTTP server. `partial`: a configuration
        file may have other options too.
        """
        self.sections = dict(sections)
        self.partial = partial
        every = (spec for key, cls in self.sections.items() for spec in _specs(key, cls))
        self.specs = tuple(spec for spec in every if server or not spec.option.server)
        self._flags = _index(self.specs)

    @cached_property
    def by_name(self) -> dict[str, Spec]:
        return {spec.name: spec for spec in self.specs}

    def find(self, written: str) -> Match | None:
        """Look an option string up, exactly; underscores count as dashes before the first dot."""
        head, dot, keys = written.partition(".")
        known = self._flags.get(head.replace("_", "-"))
        if known is None or not dot:
            return known
        append = keys.endswith("+")
        path = tuple(keys[: -1 if append else None].split("."))
        if known.spec.base is not dict or not all(path):
            return None
        return Match(known.spec, path=path, append=append)

    def suggest(self, written: str) -> str:
        """Return a suggestion such as " Did you mean '--x'?" for an option string that `find` does not know."""
        head, dot, _ = written.partition(".")
        known = self.find(head)
        if known is not None and dot:
            return f" {head} takes no keys." if known.spec.base is not dict else f" Write {head}.KEY VALUE."
        return nearest(head, (flag for spec in self.specs for flag in spec.flags if flag.startswith("--")))


def _specs(key: str, cls: Any) -> Iterator[Spec]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        base, many, optional = _shape(hints[field.name])
        factory: Any = field.default_factory
        yield Spec(
            section=key,
            group=cls.__name__,
            name=field.name,
            base=base,
            many=many,
            optional=optional,
            default=field.default if factory is dataclasses.MISSING else factory(),
            option=option_of(field),
        )


def _shape(hint: Any) -> tuple[type, bool, bool]:
    """Return (type of one element, is a tuple, takes None) of a field's type."""
    optional = NoneType in get_args(hint)
    if optional:
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    many = get_origin(hint) is tuple
    base = get_args(hint)[0] if many else get_origin(hint) or hint
    if base not in (bool, int, float, str, dict):
        raise TypeError(f"an option cannot have the type {hint}")
    return base, many, optional


def _index(specs: Iterable[Spec]) -> dict[str, Match]:
    """Map each option string to its meaning. --disable-x is understood as --no-enable-x where no option has that
    name.
    """
    table: dict[str, Match] = {}

    def claim(flag: str, match: Match) -> None:
        if flag in table:
            raise TypeError(f"two options claim {flag}")
        table[flag] = match

    specs = tuple(specs)
    for spec in specs:
        for flag in (spec.flag, *spec.option.aliases):
            claim(flag, Match(spec))
    for spec in specs:
        if spec.base is bool:
            claim("--no-" + spec.flag[2:], Match(spec, positive=False))
            verb, _, rest = spec.flag[2:].partition("-")
            if verb in _OPPOSITE:
                table.setdefault(f"--{_OPPOSITE[verb]}-{rest}", Match(spec, positive=False))
    return table
