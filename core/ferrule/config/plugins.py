"""The user's wishes about plugins, from options and environment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule.config.option import opt
from ferrule.config.parse import parse
from ferrule.config.schema import Schema
from ferrule.config.sections import PluginConfig
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.plugin.files import file_refs
from ferrule.plugin.plugin_set import Plugins
from ferrule.plugin.refs import PluginRef
from ferrule.plugin.select import Preference, Selection

_CHOOSING = frozenset({"plugins_allow", "plugins_deny", "plugins_prefer", "plugin", "plugin_adapter", "plugin_config"})


def configured(plugins: Plugins, options: PluginConfig, environment: Environment) -> Plugins:
    """Apply the user's options to a discovery, without a second walk.

    Raises ConfigError for a malformed option, PluginError for a file that cannot be read.
    """
    files = tuple(dict.fromkeys(_files(options)))
    return plugins.under(_selection(options, environment), files, _plugin_options(options))


@dataclass(frozen=True, kw_only=True)
class _FileConfig:
    """The option that names a file with more options."""

    config: str | None = opt(None, "YAML file with options.")


def selection_options(argv: Sequence[str], environment: Environment) -> PluginConfig:
    """Read the options about the choice of plugins from command line, environment and configuration file, before the
    command itself is chosen.

    Raises ConfigError. A file that cannot be read is passed over: the command reads it again and says what is wrong, or
    its --config is another option than that of `ferrule serve`.
    """
    try:
        with_file = Schema({"plugins": PluginConfig, "file": _FileConfig}, partial=True)
        words = _words_of(argv, with_file, {*_CHOOSING, "config"})
        return parse(words, with_file, env=environment, positional=None).config.plugins
    except ConfigError:
        schema = Schema({"plugins": PluginConfig})
        return parse(_words_of(argv, schema, _CHOOSING), schema, env=environment, positional=None).config.plugins


def _words_of(argv: Sequence[str], schema: Schema, names: Collection[str]) -> list[str]:
    """Return the words of a command line that are these options and their values."""
    taken: list[str] = []
    chosen = False
    for word in argv:
        if word == "--":
            break
        if word.startswith("-"):
            match = schema.find(word.partition("=")[0])
            chosen = match is not None and match.spec.name in names
        if chosen:
            taken.append(word)
    return taken


def _plugin_options(options: PluginConfig) -> dict[str, dict[str, Any]]:
    for id, values in options.plugin_config.items():
        kind, colon, name = id.partition(":")
        if not (kind and colon and name):
            raise ConfigError(f"--plugin-config takes kind:name={{...}}, not '{id}'.")
        if not isinstance(values, dict):
            raise ConfigError(f'--plugin-config {id}: options are a JSON object, as in {id}={{"option": 1}}.')
    return dict(options.plugin_config)


def _files(options: PluginConfig) -> Iterator[PluginRef]:
    parsers = {"tool_parser": options.tool_parser_plugin, "reasoning_parser": options.reasoning_parser_plugin}
    for option in (*options.plugin, *(f"{kind}={file}" for kind, file in parsers.items() if file)):
        yield from file_refs(option, options.plugin_adapter)


def _selection(options: PluginConfig, environment: Environment) -> Selection:
    """Return the selection of plugins. --plugins-allow replaces the environment's list."""
    prefer = []
    for wish in options.plugins_prefer:
        name, equals, distribution = wish.partition("=")
        if not equals or ":" not in name or not distribution.strip():
            raise ConfigError(f"--plugins-prefer takes kind:name=distribution, not '{wish}'.")
        prefer.append(Preference(name.strip(), distribution.strip()))
    allow, source = environment.plugins, "FERRULE_PLUGINS"
    if allow is not None:
        allow = tuple(item if ":" in item else f"*:{item}" for item in allow)
    if options.plugins_allow:
        allow, source = options.plugins_allow, "--plugins-allow"
    return Selection(allow, options.plugins_deny, tuple(prefer), source)
