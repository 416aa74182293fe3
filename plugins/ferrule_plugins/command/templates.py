"""`ferrule templates`: the chat templates that come with Ferrule."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ferrule.config.help import CommandUsage
from ferrule.config.option import opt
from ferrule.config.parse import parse_command
from ferrule.errors import ConfigError, nearest
from ferrule.frontend.text.builtin import BuiltinTemplate, builtin_templates, find_builtin
from ferrule.interfaces.command import Command
from ferrule.interfaces.plugins import Plugins

_LIST = (
    "List the built-in chat templates, which `--chat-template NAME` takes: the name, the tool parser that reads its "
    "calls, and what it is. `ferrule templates show NAME` prints one."
)
_SHOW = "Print the text of a built-in chat template."


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of `ferrule templates`."""

    parser: str | None = opt(None, "Only templates for this tool parser.")
    json: bool = opt(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `ferrule templates show`."""

    name: str = opt("", "Its name.")


class TemplatesCommand(Command):
    summary = "List and print the built-in chat templates."

    def run(self, argv: Sequence[str], plugins: Plugins) -> int:
        """List the templates, or print one for `templates show NAME`. Returns 0. Raises ConfigError for a name that is
        not found.
        """
        if argv and argv[0] == "show":
            usage = CommandUsage("ferrule templates show", _SHOW, "name")
            parsed = parse_command(argv[1:], usage, plugins, sections={"show": ShowOptions})
            return 0 if parsed is None else _show(parsed.extra["show"])
        if argv and not argv[0].startswith("-"):
            raise ConfigError(f"ferrule templates has no action {argv[0]!r}.{nearest(argv[0], ['show'])}", _LIST)
        parsed = parse_command(argv, CommandUsage("ferrule templates", _LIST), plugins, sections={"list": ListOptions})
        return 0 if parsed is None else _list(parsed.extra["list"])


def _list(options: ListOptions) -> int:
    found = [template for template in builtin_templates().values() if options.parser in (None, template.parser)]
    if options.json:
        print(msgspec.json.format(msgspec.json.encode([_row(template) for template in found]), indent=2).decode())
        return 0
    name = max((len(template.name) for template in found), default=0)
    parser = max((len(template.parser) for template in found), default=0)
    for template in found:
        print(f"{template.name:<{name}}  {template.parser or '-':<{parser}}  {template.about}")
    return 0


def _show(options: ShowOptions) -> int:
    template = find_builtin(options.name)
    if template is None:
        names = list(builtin_templates())
        why = f"No built-in chat template is named {options.name!r}.{nearest(options.name, names)}"
        raise ConfigError(why if options.name else "The template's name is missing.", f"Names: {', '.join(names)}.")
    sys.stdout.write(template.text)
    return 0


def _row(template: BuiltinTemplate) -> dict[str, object]:
    fields = ("name", "about", "models", "parser", "also", "format")
    return {field: getattr(template, field) for field in fields}
