"""`--help` and `--help=TOPIC`, rendered from the schema; nothing is imported for it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ferrule.config.schema import Schema, Spec, title
from ferrule.config.values import size_text
from ferrule.env import variable
from ferrule.errors import nearest

_INDENT = 26  # columns before the sentence about an option
_FEW = 24  # up to so many options are all shown by a plain --help
_SIZES = "SIZE is a whole number, also written 1k (1000), 1K (1024), 25.6k (25600); likewise m, g, t."


@dataclass(frozen=True)
class Usage:
    """How a command is called. `positional` is the option that an argument without a dash stands for."""

    command: str  # "ferrule serve"
    summary: str
    positional: str | None = None


class PluginNames(Protocol):
    """The part of the plugin set that help needs; it imports no plugin."""

    def names(self, kind: str) -> tuple[str, ...]: ...

    def origin(self, kind: str, name: str) -> str: ...


def topic(argv: Sequence[str]) -> str | None:
    """What help is asked for: "" for a plain --help, None for no help."""
    for word in argv:
        if word == "--":
            return None
        if word in {"-h", "--help"}:
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def render(schema: Schema, usage: Usage, topic: str, plugins: PluginNames, width: int = 0) -> str:
    """The help text. `width` is in columns; 0: that of the terminal."""
    page = _Page(schema, usage, plugins, width or terminal_width())
    word = topic.strip().lower().replace("_", "-")
    groups = {cls.__name__.lower(): key for key, cls in schema.sections.items()}
    if not word:
        lines = page.everything() if len(schema.specs) <= _FEW else page.overview()
    elif word == "all":
        lines = page.everything()
    elif word == "listgroup":
        lines = page.groups()
    elif word in groups:
        lines = page.group(groups[word])
    else:
        lines = page.search(word)
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns of the terminal on standard output, within what reads well; 100 where there is none."""
    try:
        return min(max(os.get_terminal_size(1).columns, 50), 120)
    except OSError:
        return 100


def columns(left: str, text: str, width: int, indent: int = _INDENT) -> list[str]:
    """`left`, and `text` wrapped in the column beside it, or below it where `left` is too long."""
    rows = textwrap.wrap(text, max(width - indent, 24), break_on_hyphens=False) or [""]
    if len(left) + 2 > indent:
        return [left, *(" " * indent + row for row in rows)]
    return [f"{left:<{indent}}{rows[0]}".rstrip(), *(" " * indent + row for row in rows[1:])]


def spelling(spec: Spec) -> str:
    """The option strings, short ones first; --[no-]x for a boolean."""
    flag = f"--[no-]{spec.flag[2:]}" if spec.base is bool else spec.flag
    return ", ".join((*spec.option.aliases, flag))


def metavar(spec: Spec) -> str:
    """How the value stands behind the option."""
    if spec.base is bool:
        return " [true|false]" if spec.option.optional_value else ""
    name = {int: "SIZE" if spec.option.human else "N", float: "X", str: "TEXT", dict: "JSON"}[spec.base]
    if spec.option.kind:
        name = "NAME"
    if spec.many:
        name = "JSON" if spec.option.json else f"{name} [{name} ...]" if spec.option.nargs == "+" else name
    return f" [{name}]" if spec.option.bare else f" {name}"


def default_text(spec: Spec) -> str:
    """The default as the user would write it; empty where the sentence already tells it, and for none and false."""
    if spec.default is None or spec.default is False or spec.default in ("", (), {}) or "Default" in spec.option.doc:
        return ""
    if spec.base is bool:
        return "true"
    if spec.option.human:
        return size_text(spec.default)
    return " ".join(str(value) for value in spec.default) if spec.many else str(spec.default)


class _Page:
    """Lines of help for one command."""

    def __init__(self, schema: Schema, usage: Usage, plugins: PluginNames, width: int) -> None:
        self._schema = schema
        self._usage = usage
        self._plugins = plugins
        self._width = width

    def _head(self) -> Iterator[str]:
        argument = f" [{self._usage.positional.upper()}]" if self._usage.positional else ""
        options = " [options]" if self._schema.specs else ""
        yield f"usage: {self._usage.command}{argument}{options}"
        yield ""
        yield from textwrap.wrap(self._usage.summary, self._width)

    def overview(self) -> Iterator[str]:
        yield from self._head()
        yield ""
        yield "Most used options:"
        yield from self._options(spec for spec in self._schema.specs if spec.option.common)
        yield ""
        yield "Groups of options:"
        yield from self.groups()
        yield ""
        hints = {
            "--help=all": "every option",
            "--help=listgroup": "the groups",
            "--help=ModelConfig": "one group",
            "--help=max-num-seqs": "one option",
            "--help=max": "every option whose name contains the word",
        }
        yield "More help:"
        for left, text in hints.items():
            yield from columns("  " + left, text, self._width)

    def everything(self) -> Iterator[str]:
        yield from self._head()
        for key in self._schema.sections:
            if self._schema.group(key):
                yield ""
                yield from self._group(key)
        yield from self._sizes(self._schema.specs)

    def groups(self) -> Iterator[str]:
        for key, cls in self._schema.sections.items():
            count = len(self._schema.group(key))
            if count:
                noun = "option" if count == 1 else "options"
                yield from columns("  " + cls.__name__, f"{title(cls)} ({count} {noun})", self._width)

    def group(self, key: str) -> Iterator[str]:
        yield from self._group(key)
        yield from self._sizes(self._schema.group(key))

    def _group(self, key: str) -> Iterator[str]:
        cls = self._schema.sections[key]
        yield from textwrap.wrap(f"{cls.__name__}: {title(cls)}", self._width)
        yield from self._options(self._schema.group(key))

    def search(self, word: str) -> Iterator[str]:
        """One option by its exact name, else every option with the word in a spelling of it."""
        exact = self._schema.find("--" + word.lstrip("-"))
        if exact is not None:
            found: tuple[Spec, ...] = (exact.spec,)
        else:
            found = tuple(s for s in self._schema.specs if any(word in flag for flag in s.flags))
        if found:
            yield from self._options(found)
            yield from self._sizes(found)
            return
        known = [spec.flag[2:] for spec in self._schema.specs] + [
            cls.__name__ for cls in self._schema.sections.values()
        ]
        yield f"No group or option matches {word!r}.{nearest(word, known)}"
        yield "See --help=listgroup for the groups and --help=all for every option."

    def _options(self, specs: Iterable[Spec]) -> Iterator[str]:
        for spec in specs:
            yield from columns("  " + spelling(spec) + metavar(spec), " ".join(self._facts(spec)), self._width)

    def _sizes(self, specs: Iterable[Spec]) -> Iterator[str]:
        if any(spec.option.human for spec in specs):
            yield ""
            yield from textwrap.wrap(_SIZES, self._width)

    def _facts(self, spec: Spec) -> Iterator[str]:
        option = spec.option
        yield option.doc
        if option.choices:
            yield f"One of: {', '.join(map(str, option.choices))}."
        if spec.limits:
            yield f"Must be {spec.limits}."
        if option.json and spec.base is dict:
            yield f"Also key by key: {spec.flag}.KEY VALUE."
        if option.append:
            yield "May be given more than once."
        if option.kind:
            names = [f"{n} ({self._plugins.origin(option.kind, n)})" for n in self._plugins.names(option.kind)]
            if names:
                yield f"Available: {', '.join(names)}."
        if option.env:
            yield f"Environment: {variable(option.env)}."
        if default_text(spec):
            yield f"Default: {default_text(spec)}."
