"""Command line, configuration file, environment and keyword arguments → `Config`, with where each value came from.

Precedence: command line > environment > file > default. Option strings match exactly, there are no abbreviations.

argparse is not used: it matches prefixes, does not support dotted keys, and stops at the first error. Here all four
sources follow one set of rules, and all errors are reported in one block. Exit status 2 means exactly that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, get_type_hints

import msgspec

from ferrule import env as environment
from ferrule.config import help as helptext
from ferrule.config.schema import Item, Match, Schema, Spec
from ferrule.config.sections import Config
from ferrule.config.suffixes import split_suffixes
from ferrule.config.values import convert, entry, is_boolean, merge, opens, problem
from ferrule.env import Environment
from ferrule.errors import ConfigError, nearest
from ferrule.plugin import Plugins

_ATTACHED = re.compile(r"(-[A-Za-z][A-Za-z-]*)([0-9]+)")  # -O3
COMMAND_LINE = "command line"
ENVIRONMENT = "environment"


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A parsed configuration. `origins` has an entry for each option that is not at its default; `notices` are
    sentences for its log.
    """

    config: Config
    extra: Mapping[str, Any]  # key of a further section → its instance
    origins: Mapping[str, str]  # option name → "command line", "serve.yaml:3", "environment"
    notices: tuple[str, ...]


def config_sections() -> Mapping[str, type]:
    """Return the class of every section of `Config`, by its key."""
    hints = get_type_hints(Config)
    return {field.name: hints[field.name] for field in fields(Config) if field.name not in ("env", "places", "origins")}


@cache
def config_schema() -> Schema:
    """Return the options of `Config`. The result is cached: a start asks for it several times."""
    return Schema(config_sections())


def parse(
    argv: Sequence[str],
    schema: Schema | None = None,
    *,
    env: Environment | None = None,
    positional: str | None = "model",
) -> Parsed:
    """Read a command's arguments. `positional` is the option that an argument without a dash stands for.

    Raises ConfigError: one block with one line per problem.
    """
    schema = config_schema() if schema is None else schema
    scan = _Scan(schema, argv, positional)
    parsed = _finish(schema, scan.items, scan.problems, env)
    last = scan.items[-1] if scan.items else None
    if last is None or positional is None or positional in parsed.origins:
        return parsed
    if isinstance(last.raw, list) and len(last.raw) > 1:
        swallowed = (
            f"No {positional.upper()} is given, and {last.label} takes all {len(last.raw)} words behind it. If one of "
            f"them is the {positional.upper()}, write it before the options."
        )
        return replace(parsed, notices=(*parsed.notices, swallowed))
    return parsed


def parse_kwargs(
    env: Environment | None = None, sections: Mapping[str, type] | None = None, /, **kwargs: Any
) -> Parsed:
    """Parse the options of an offline `LLM`, given by field names; options of the HTTP server are not among them.

    `sections`: as for `parse_command`. Raises ConfigError, also for an unknown name.
    """
    schema = Schema(config_sections() if sections is None else sections, server=False)
    items, problems = [], []
    for name, value in kwargs.items():
        spec = schema.by_name.get(name)
        if spec is None:
            problems.append(f"Unexpected keyword argument {name!r}.{nearest(name, schema.by_name)}")
        else:
            items.append(Item(Match(spec), value, "keyword argument", name))
    return _finish(schema, items, problems, env)


def parse_command(
    argv: Sequence[str],
    usage: helptext.CommandUsage,
    plugins: Plugins,
    *,
    sections: Mapping[str, type] | None = None,
    server: bool = True,
) -> Parsed | None:
    """Print the help that was asked for and return None, or parse; a command calls this first.

    `sections` are all sections of the command; None: those of `Config`. A command that runs an engine and has options
    of its own passes ``{**config_sections(), "bench": BenchConfig}``.
    """
    schema = Schema(config_sections() if sections is None else sections, server=server)
    topic = helptext.topic(argv)
    if topic is not None:
        print(helptext.render(schema, usage, topic, plugins))
        return None
    return parse(argv, schema, positional=usage.positional)


class _Scan:
    """A splitter of arguments into items, which does not look at values."""

    def __init__(self, schema: Schema, argv: Sequence[str], positional: str | None) -> None:
        self.items: list[Item] = []
        self.problems: list[str] = []
        self._schema = schema
        self._positional = None if positional is None else schema.by_name[positional]
        self._argv = argv
        self._at = 0
        while self._at < len(argv):
            word = self._next()
            if word == "--":
                for rest in argv[self._at :]:
                    self._argument(rest)
                break
            if _is_flag(word):
                self._option(word)
            else:
                self._argument(word)

    def _next(self) -> str:
        self._at += 1
        return self._argv[self._at - 1]

    def _value_follows(self) -> bool:
        return self._at < len(self._argv) and not _is_flag(self._argv[self._at])

    def _argument(self, word: str) -> None:
        spec = self._positional
        if spec is None:
            self.problems.append(f"Unexpected argument {word!r}.")
            return
        earlier = next((i for i in self.items if i.match.spec is spec), None)
        if earlier is not None:
            self.problems.append(f"Unexpected argument {word!r}: {spec.name} is already {earlier.raw!r}.")
            return
        self.items.append(Item(Match(spec), word, COMMAND_LINE, spec.name.upper()))

    def _option(self, word: str) -> None:
        flag, equals, attached = word.partition("=")
        match = self._schema.find(flag)
        short = None if match else _ATTACHED.fullmatch(word)
        if short is not None and self._schema.find(short[1]) is not None:
            flag, equals, attached = short[1], "=", short[2]
            match = self._schema.find(flag)
        if match is None:
            self.problems.append(f"Unknown option {flag}.{self._schema.suggest(flag)}")
            while self._value_follows():
                self._next()
            return
        if not equals:
            raw = self._following(match)
        elif match.spec.many and not match.spec.option.json:
            raw = [attached]
        else:
            raw = attached
        if raw is None:
            self.problems.append(f"{flag} needs a value: expected {match.spec.expects}.")
            return
        self.items.append(Item(match, raw, COMMAND_LINE, flag))

    def _following(self, match: Match) -> Any:
        """Return the words behind an option that are its value; None where one is missing."""
        spec = match.spec
        if spec.base is bool:
            word = self._argv[self._at] if match.positive and self._value_follows() else ""
            if spec.option.optional_value:
                is_value = is_boolean(word) or (bool(word) and opens(spec, word))
            else:  # a digit may be a model's folder
                is_value = word.lower() in ("true", "false")
            return self._next() if is_value else True
        follows = self._value_follows() and not (spec.option.bare and spec.option.choices)
        if not follows:  # the value of a bare option with choices is attached: the next word may be the model
            return True if spec.option.bare else None
        words = [self._next()]
        while spec.option.nargs == "+" and self._value_follows():
            words.append(self._next())
        return words if spec.many and not spec.option.json else words[0]


def _is_flag(word: str) -> bool:
    """Return whether a word is a dash followed by anything but a number."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")


_Place = tuple[str, tuple[str, ...]]  # an option's name, and the keys of a value in its object


class _Draft:
    """Values found so far, and everything that is wrong or worth a notice."""

    def __init__(self, schema: Schema) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.places: dict[str, str] = {}  # see `Config`
        self.problems: list[str] = []
        self.notices: list[str] = []
        self.replaced: list[str] = []  # notices about options that are
        self._schema = schema
        self._labels: dict[str, str] = {}  # how an error names the last item of an option

    def apply(self, written: Sequence[Item]) -> None:
        """Take the items of one source, which wins over the sources before it.

        A whole JSON object replaces that of an earlier source; dotted keys change single keys of it.
        """
        items: list[Item] = []
        filled: set[_Place] = set()  # by options that are replaced
        for item in written:
            try:
                meant = list(self._meant(item))
            except ValueError as error:
                self.problems.append(problem(item.match.spec, item.label, item.raw, str(error)))
                continue
            items += meant
            if item.match.spec.option.replaced:
                filled |= {(each.match.spec.name, each.match.path) for each in meant}
        for item in items:
            if item.match.spec.base is dict and not item.match.path:
                self.values.pop(item.match.spec.name, None)
                self.origins.pop(item.match.spec.name, None)
        seen: dict[str, Any] = {}  # what this source alone says
        said: dict[_Place, tuple[str, Any]] = {}  # of the places that are `filled`, by which option
        for item in items:
            name = item.match.spec.name
            try:
                self.values[name] = self._value(item, seen)
            except ValueError as error:
                self.problems.append(problem(item.match.spec, item.label, item.raw, str(error)))
            earlier = self.origins.get(name, item.origin)
            merged = item.match.path and earlier != item.origin
            self.origins[name] = f"{earlier}, {item.origin}" if merged else item.origin
            self._labels[name] = item.label
            self._place(item)
            for place in filled:
                self._compare(place, item.label, seen, said)

    def _compare(self, place: _Place, label: str, seen: Mapping[str, Any], said: dict[_Place, tuple[str, Any]]) -> None:
        """Note a problem where an option that is replaced and another one give a place different values."""
        name, path = place
        value = seen.get(name)
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None or self._schema.by_name[name].option.append:
            return
        earlier, other = said.setdefault(place, (label, value))
        if other != value:
            target = ".".join((self._schema.by_name[name].flag, *path))
            self.problems.append(
                f"{label} and {earlier} give {target} different values, {value!r:.80} and {other!r:.80}: leave one out."
            )

    def _place(self, item: Item) -> None:
        name = item.match.spec.name
        changed = ".".join((name, *item.match.path))
        for path in [path for path in self.places if path == changed or path.startswith(f"{changed}.")]:
            del self.places[path]
        self.places |= {".".join((name, *path)): place for path, place in item.places.items()}

    def _meant(self, item: Item) -> Iterator[Item]:
        """Yield the item without words behind a colon, which are options too; or the item that replaces it. Raises
        ValueError.
        """
        spec, option = item.match.spec, item.match.spec.option
        if option.suffixes and isinstance(item.raw, str):
            before, words = split_suffixes(item.raw, option.suffixes)
            for word in words:
                yield replace(item, match=self._find(option.suffixes[word]), raw=True)
            item = replace(item, raw=before)
        if option.keyed and isinstance(item.raw, str) and not item.match.path:
            key, value = entry(spec, item.raw)
            item = replace(item, match=replace(item.match, path=key), raw=value)
        if not option.replaced:
            yield item
        elif (value := self._value(item, {})) != spec.default and value not in option.accepted:
            target = self._find(option.replaced)
            match = replace(target, path=(*target.path, *item.match.path), append=item.match.append)
            self.replaced.append(f"{item.label} is replaced by {option.replaced}, which has got the value.")
            yield replace(item, match=match, raw=option.renamed.get(str(value), item.raw))

    def _find(self, flag: str) -> Match:
        found = self._schema.find(flag)
        if found is None:
            raise TypeError(f"no option {flag}")
        return found

    def judge(self) -> None:
        """Say what becomes of values that have no effect, or need a feature that is not here."""
        missing: dict[str, list[str]] = {}
        for name, value in self.values.items():
            spec, label = self._schema.by_name[name], self._labels[name]
            if name == "api_key" and not value:
                self.notices.append(f"{label}: no key is set, every client may use the server.")
            if value == spec.default or value in spec.option.accepted:
                continue
            if spec.option.inert:
                self.notices.append(f"{label} is accepted without effect: {spec.option.inert}.")
            if spec.option.missing:
                missing.setdefault(spec.option.missing, []).append(label)
        for feature, labels in missing.items():
            self.problems.append(f"{', '.join(dict.fromkeys(labels))}: not in this build: {feature}.")

    def _value(self, item: Item, seen: dict[str, Any]) -> Any:
        spec = item.match.spec
        repeated = spec.name in seen

        def notice(text: str) -> None:
            self.notices.append(f"{item.label}: {text}.")

        if spec.base is dict and not item.match.path and opens(spec, item.raw):
            return dict(spec.default)
        if spec.base is dict:
            seen[spec.name] = merge(seen.get(spec.name, {}), item.match, item.raw, notice)
            return merge(self.values.get(spec.name, {}), item.match, item.raw, lambda text: None)
        if str(item.raw) in spec.option.foreign:
            notice(f"{item.raw} is not here; {spec.default!r} is used")
        if spec.option.bare and item.raw is True:
            value: Any = ""
        else:
            value = convert(spec, item.raw)
        if spec.base is bool and value is not None:
            value = value == item.match.positive
        seen[spec.name] = value
        if repeated and spec.option.append:
            return (*self.values.get(spec.name, ()), *value)
        if repeated:
            notice("given more than once; the last one counts")
        return value


def _finish(schema: Schema, items: list[Item], problems: Iterable[str], env: Environment | None) -> Parsed:
    draft = _Draft(schema)
    draft.problems += problems
    env = environment.read() if env is None else env
    if "model" in schema.sections:  # what concerns an engine
        draft.notices += (*env.notices, *env.unknown(schema.by_name))
        draft.problems += env.missing
    variables = _from_environment(schema, env)
    files = [item for item in (*items, *variables) if item.match.spec.name == "config"]
    path = next((item.raw for item in files), None)
    if path is not None and not opens(files[0].match.spec, path):
        # imported here, because it brings yaml: most starts have no file
        from ferrule.config.file import read_file

        try:
            draft.apply(read_file(str(path), schema))
        except ConfigError as error:
            draft.problems.append(error.message)
    draft.apply(variables)
    draft.apply(items)
    draft.judge()
    if draft.problems:
        raise ConfigError("\n".join(draft.problems))
    notices = dict.fromkeys(draft.notices + ([] if env.no_deprecation_warning else draft.replaced))
    made = {key: _make(cls, key, schema.specs, draft.values) for key, cls in schema.sections.items()}
    core = {field.name: made.pop(field.name) for field in fields(Config) if field.name in made}
    env = msgspec.structs.replace(env, options={}, notices=(), missing=())
    config = Config(**core, env=env, places=draft.places, origins=draft.origins)
    return Parsed(config=config, extra=made, origins=draft.origins, notices=tuple(notices))


def _from_environment(schema: Schema, env: Environment) -> list[Item]:
    """Return the options that environment variables set: as on the command line, with spaces between the values of a
    list.
    """
    items = []
    for spec in schema.specs:
        raw: Any
        name, raw = env.options.get(spec.name, ("", None))
        if isinstance(raw, str) and spec.many and not spec.option.json:
            raw = raw.split()
        if raw is None and spec.option.env:
            name, raw = environment.variable(spec.option.env), getattr(env, spec.option.env)
        if raw is not None:
            items.append(Item(Match(spec), raw, ENVIRONMENT, f"Environment variable {name}"))
    return items


def _make(cls: type, key: str, specs: Iterable[Spec], values: Mapping[str, Any]) -> Any:
    names = {spec.name for spec in specs if spec.section == key}
    return cls(**{name: value for name, value in values.items() if name in names})
