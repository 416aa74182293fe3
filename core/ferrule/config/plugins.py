"""The user's wishes about plugins, from options and environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ferrule.config.parse import parse
from ferrule.config.schema import Schema
from ferrule.config.sections import PluginConfig
from ferrule.env import Environment
from ferrule.errors import ConfigError
from ferrule.plugin.files import file_refs
from ferrule.plugin.plugin_set import Plugins
from ferrule.plugin.refs import PluginRef
from ferrule.plugin.select import Preference, Selection

_CHOOSING = frozenset({"plugins_allow", "plugins_deny", "plugins_prefer"})


def configured(plugins: Plugins, options: PluginConfig, environment: Environment) -> Plugins:
    """The same discovery under the user's options, without a second walk.

    Raises ConfigError for a malformed option, PluginError for a file that cannot be read.
    """
    return plugins.under(_selection(options, environment), tuple(dict.fromkeys(_files(options))))


def selection_options(argv: Sequence[str], environment: Environment) -> PluginConfig:
    """What command line and environment say about the choice of plugins, read before the command itself is chosen.

    Raises ConfigError.
    """
    schema = Schema({"plugins": PluginConfig})
    taken: list[str] = []
    takes = False
    for word in argv:
        if word == "--":
            break
        if word.startswith("-"):
            match = schema.find(word.partition("=")[0])
            takes = match is not None and match.spec.name in _CHOOSING
        if takes:
            taken.append(word)
    return parse(taken, schema, env=environment, positional=None).config.plugins


def _files(options: PluginConfig) -> Iterator[PluginRef]:
    parsers = {"tool_parser": options.tool_parser_plugin, "reasoning_parser": options.reasoning_parser_plugin}
    for option in (*options.plugin, *(f"{kind}={file}" for kind, file in parsers.items() if file)):
        yield from file_refs(option, options.plugin_adapter)


def _selection(options: PluginConfig, environment: Environment) -> Selection:
    """--plugins-allow replaces the environment's list."""
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
