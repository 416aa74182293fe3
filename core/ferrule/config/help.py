"""What a command says about itself: how help is asked for, and the pages that `--help` prints.

Nothing else is imported for it: no command, no torch, and no plugin but the one whose options are asked for.

The line for a command in `ferrule --help` is read from its source text, and names of plugins from metadata.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ferrule.config.schema import Schema, Spec
from ferrule.config.values import SCALES
from ferrule.env import variable
from ferrule.errors import nearest
from ferrule.plugin import KINDS, Plugins

_INDENT = 26  # columns before the sentence about an option
_FEW = 24  # up to so many options are all shown by a plain --help
_SIZES = "SIZE is a whole number, also written 1k (1000), 1K (1024), 25.6k (25600); likewise m, g, t."


@dataclass(frozen=True)
class CommandUsage:
    """A command's name and summary for its help. `positional` is the option that an argument without a dash stands
    for.
    """

    command: str  # "ferrule serve"
    summary: str
    positional: str | None = None


def topic(argv: Sequence[str]) -> str | None:
    """Return the topic that help is asked for: "" for a plain --help, None for no help."""
    for word in argv:
        if word == "--":
            return None
        if word in {"-h", "--help"}:
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def render(schema: Schema, usage: CommandUsage, topic: str, plugins: Plugins, width: int = 0) -> str:
    """Return the help text of a command: `topic` is "" for a plain --help. `width` is in columns; 0: that of the
    terminal.
    """
    page = _Page(schema, usage, plugins, width or terminal_width())
    word = topic.strip().lower().replace("_", "-")
    kind, _, name = topic.strip().partition(":")
    titles = {name.lower(): name for name in groups(schema)}
    if not word:
        lines = page.everything() if len(schema.specs) <= _FEW else page.overview()
    elif word == "all":
        lines = page.everything()
    elif word == "json":
        return page.json()
    elif word == "listgroup":
        lines = page.groups()
    elif word in titles:
        lines = page.group(titles[word])
    elif kind in KINDS and name:
        lines = page.plugin(kind, name)
    else:
        lines = page.search(word)
    return "\n".join(lines)


def groups(schema: Schema) -> dict[str, tuple[Spec, ...]]:
    """Return the options by the titles of their groups. Sections of one name are one group, in the place of the first
    of them.
    """
    found: dict[str, list[Spec]] = {}
    for spec in schema.specs:
        found.setdefault(spec.group, []).append(spec)
    return {name: tuple(specs) for name, specs in found.items()}


def summaries(schema: Schema) -> dict[str, str]:
    """Return one line about each group, by its title."""
    return {cls.__name__: (cls.__doc__ or "").strip().splitlines()[0] for cls in reversed(schema.sections.values())}


def terminal_width() -> int:
    """Return the columns of the terminal on standard output, between 50 and 120 to stay readable; 100 where there is no
    terminal.
    """
    try:
        return min(max(os.get_terminal_size(1).columns, 50), 120)
    except OSError:
        return 100


def columns(left: str, text: str, width: int, indent: int = _INDENT) -> list[str]:
    """Lay out `left` with `text` wrapped in the column beside it, or below it where `left` is too long."""
    rows = textwrap.wrap(text, max(width - indent, 24), break_on_hyphens=False) or [""]
    if len(left) + 2 > indent:
        return [left, *(" " * indent + row for row in rows)]
    return [f"{left:<{indent}}{rows[0]}".rstrip(), *(" " * indent + row for row in rows[1:])]


def spelling(spec: Spec) -> str:
    """Return the option strings, short ones first; --[no-]x for a boolean."""
    flag = f"--[no-]{spec.flag[2:]}" if spec.base is bool else spec.flag
    return ", ".join((*spec.option.aliases, flag))


def metavar(spec: Spec) -> str:
    """Return the placeholder of the value behind the option."""
    if spec.base is bool:
        return " [true|false]" if spec.option.optional_value else ""
    name = {int: "SIZE" if spec.option.human else "N", float: "X", str: "TEXT", dict: "JSON"}[spec.base]
    if spec.option.kind:
        name = "NAME"
    if spec.option.keyed:
        name = "KEY={JSON}"
    if spec.many:
        name = "JSON" if spec.option.json else f"{name} [{name} ...]" if spec.option.nargs == "+" else name
    return f" [{name}]" if spec.option.bare else f" {name}"


def default_text(spec: Spec) -> str:
    """Return the default as the user would write it; empty where the sentence already tells it, and for none and
    false.
    """
    if spec.default is None or spec.default is False or spec.default in ("", (), {}) or "Default" in spec.option.doc:
        return ""
    if spec.base is bool:
        return "true"
    if spec.option.human:
        return size_text(spec.default)
    return " ".join(str(value) for value in spec.default) if spec.many else str(spec.default)


def size_text(value: int) -> str:
    """Return the shortest way to write a whole number that `human_size` reads back."""
    exact = (f"{value // scale}{letter}" for letter, scale in SCALES.items() if value and value % scale == 0)
    return min(exact, key=len, default="0")


def fate(spec: Spec) -> str:
    """Return a sentence about an option that does not simply work; empty for one that does."""
    option = spec.option
    if option.inert:
        return f"Accepted without effect: {option.inert}."
    if option.replaced:
        return f"Replaced by {option.replaced}."
    if not option.missing:
        return ""
    rest = "".join(f", {value}" for value in option.accepted if isinstance(value, (str, int)))
    default = "false" if spec.default is False else default_text(spec) or "the default"
    return f"Not in this build: {option.missing}; accepted: {default}{rest}."


class _Page:
    """Lines of help for one command."""

    def __init__(self, schema: Schema, usage: CommandUsage, plugins: Plugins, width: int) -> None:
        self._schema = schema
        self._usage = usage
        self._plugins = plugins
        self._width = width
        self._groups = groups(schema)
        self._summaries = summaries(schema)

    def json(self) -> str:
        """Return every option as one JSON object, for programs that complete command lines."""
        rows = [
            {
                "flags": spec.flags,
                "name": spec.name,
                "takes_value": spec.base is not bool and not spec.option.bare,
                "values": list(dict.fromkeys(map(str, (*spec.option.choices, *self._names(spec))))),
                "doc": fate(spec) or spec.option.doc,
            }
            for spec in self._schema.specs
        ]
        return msgspec.json.encode({"command": self._usage.command, "options": rows}).decode()

    def _names(self, spec: Spec) -> tuple[str, ...]:
        return self._plugins.names(spec.option.kind) if spec.option.kind else ()

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
            "--help=policy:fcfs": "a plugin and its options, for any kind:name",
            "--help=json": "every option, for machines",
        }
        yield "More help:"
        for left, text in hints.items():
            yield from columns("  " + left, text, self._width)

    def everything(self) -> Iterator[str]:
        yield from self._head()
        for name in self._groups:
            yield ""
            yield from self._group(name)
        yield from self._sizes(self._schema.specs)

    def groups(self) -> Iterator[str]:
        for name, specs in self._groups.items():
            noun = "option" if len(specs) == 1 else "options"
            yield from columns("  " + name, f"{self._summaries[name]} ({len(specs)} {noun})", self._width)

    def group(self, name: str) -> Iterator[str]:
        yield from self._group(name)
        yield from self._sizes(self._groups[name])

    def _group(self, name: str) -> Iterator[str]:
        yield from textwrap.wrap(f"{name}: {self._summaries[name]}", self._width)
        yield from self._options(self._groups[name])

    def plugin(self, kind: str, name: str) -> Iterator[str]:
        """Yield the lines about a plugin and its options. Raises PluginError for a plugin that cannot be used."""
        options = self._plugins.options_of(kind, name)
        yield f"{self._plugins.title(kind, name)}; chosen by: {KINDS[kind].chosen_by}"
        yield ""
        if not options:
            yield "It takes no options."
            return
        yield f"Options, for --plugin-config {kind}:{name}={{...}} or --plugin-config.{kind}:{name}.OPTION VALUE:"
        for option in options:
            yield from columns(f"  {option.name}", option.text, self._width)

    def search(self, word: str) -> Iterator[str]:
        """Yield the lines about one option by its exact name, else about every option with the word in a spelling of
        it.
        """
        exact = self._schema.find("--" + word.lstrip("-"))
        if exact is not None:
            found: tuple[Spec, ...] = (exact.spec,)
        else:
            found = tuple(s for s in self._schema.specs if any(word in flag for flag in s.flags))
        if found:
            yield from self._options(found)
            yield from self._sizes(found)
            return
        known = [*(spec.flag[2:] for spec in self._schema.specs), *self._groups]
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
        if option.append or option.keyed:
            yield "May be given more than once."
        names = [f"{name} ({self._plugins.origin(option.kind or '', name)})" for name in self._names(spec)]
        if names:
            yield f"Available: {', '.join(names)}."
        if option.env:
            yield f"Environment: {variable(option.env)}."
        if default_text(spec):
            yield f"Default: {default_text(spec)}."
        if fate(spec):
            yield fate(spec)
