"""Plugins: which kinds there are, how they are found, chosen, loaded and made.

discover() -> Plugins                           once, in the launcher; imports no plugin
Plugins.load(kind, name) -> class               in each process, when the plugin is needed
Plugins.make(kind, name, …) -> instance         the same, made with what the kind's row in `KINDS` says
check_plugins(plugins, chosen, component, …)    those that are chosen are imported and their options read, early
load_first(plugins, kind, candidates, refuses)  for options whose value is `auto`
ferrule.config.plugins.configured(plugins, …)   the same discovery under the user's options
ferrule.hooks.open_hooks(plugins, config)       what tells every hooks plugin
"""

from ferrule.plugin.auto import load_first
from ferrule.plugin.check import check_plugins
from ferrule.plugin.kinds import CONTRACT, KINDS, Component, Kind
from ferrule.plugin.options import PluginOption
from ferrule.plugin.plugin_set import Plugins, discover
from ferrule.plugin.refs import PluginRef
from ferrule.plugin.select import State

__all__ = [
    "CONTRACT",
    "KINDS",
    "Component",
    "Kind",
    "PluginOption",
    "PluginRef",
    "Plugins",
    "State",
    "check_plugins",
    "discover",
    "load_first",
]
