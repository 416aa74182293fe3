"""Plugins: which kinds there are, how they are found, chosen and loaded.

discover(options, environment) -> PluginSet     once, in the launcher; imports no plugin
PluginSet.load(kind, name) -> class             in each process, when the plugin is needed
load_first(plugins, kind, candidates, refuses)  for options whose value is `auto`
ferrule.plugin.hooks.open_hooks(plugins)        what tells every hooks plugin (imports pluggy)
"""

from ferrule.plugin.auto import Chosen, load_first
from ferrule.plugin.kinds import CONTRACT, KINDS, Kind
from ferrule.plugin.plugin_set import PluginSet, discover
from ferrule.plugin.refs import PluginRef, Shadow
from ferrule.plugin.select import State, Verdict

__all__ = [
    "CONTRACT",
    "KINDS",
    "Chosen",
    "Kind",
    "PluginRef",
    "PluginSet",
    "Shadow",
    "State",
    "Verdict",
    "discover",
    "load_first",
]
