"""`PluginSet`: what was found and what was wished, frozen, the same in every process."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ferrule.config import PluginConfig
from ferrule.env import Environment
from ferrule.errors import PluginError, nearest
from ferrule.plugin.files import file_refs
from ferrule.plugin.kinds import KINDS
from ferrule.plugin.load import load_ref
from ferrule.plugin.refs import Origin, PluginRef, Shadow, normalise
from ferrule.plugin.scan import scan
from ferrule.plugin.select import Selection, State, Verdict, parse


class PluginSet(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Implements `ferrule.interfaces.plugins.Plugins`. Crosses processes as msgpack or JSON.

    `refs` has the built-in plugins first, then the others by distribution, then files. `problems` are sentences about
    metadata or options that could not be used; `shadowed` are installs that Python does not see.
    """

    refs: tuple[PluginRef, ...] = ()
    shadowed: tuple[Shadow, ...] = ()
    problems: tuple[str, ...] = ()
    selection: Selection = Selection()

    def names(self, kind: str) -> tuple[str, ...]:
        """Names that can be chosen, built-ins first, broken ones included; so are names that two offer."""
        usable = {State.AVAILABLE, State.CONFLICT}
        return tuple(
            dict.fromkeys(ref.name for ref in self.refs if ref.kind == kind and self.verdict(ref).state in usable)
        )

    def load(self, kind: str, name: str) -> Any:
        """Import one plugin and return its class. Raises PluginError: see `find`, and whatever the import did."""
        return load_ref(self.find(kind, name))

    def origin(self, kind: str, name: str) -> str:
        """Distribution and version, for logs and errors. Where two offer one name, both. Empty when there is none."""
        refs = self.offers(kind, name)
        chosen = [ref for ref in refs if self.verdict(ref).state is State.AVAILABLE]
        return " and ".join(ref.source for ref in chosen or refs)

    def offers(self, kind: str, name: str) -> tuple[PluginRef, ...]:
        """Every reference of this kind and name, usable or not."""
        return tuple(ref for ref in self.refs if ref.kind == kind and ref.name == name)

    def find(self, kind: str, name: str) -> PluginRef:
        """The plugin that the name stands for. Raises PluginError when it is missing, denied, ambiguous …"""
        if kind not in KINDS:
            raise PluginError(f"'{kind}' is no kind of plugin.{nearest(kind, KINDS)}", f"Kinds: {', '.join(KINDS)}")
        judged = [(ref, self.verdict(ref)) for ref in self.offers(kind, name)]
        for ref, verdict in judged:
            if verdict.state is State.AVAILABLE:
                return ref
        if not judged:
            raise PluginError(f"There is no {kind} plugin '{name}'.{nearest(name, self.names(kind))}", self._menu(kind))
        reasons = "; ".join(f"{ref.source}: {verdict.reason}" for ref, verdict in judged)
        raise PluginError(f"Plugin {kind}:{name} cannot be used. {reasons}.", self._menu(kind))

    def verdict(self, ref: PluginRef) -> Verdict:
        """What becomes of a plugin of this set when its name is asked for."""
        alone = self.selection.verdict(ref)
        if alone.state is not State.AVAILABLE:
            return alone
        others = [
            other
            for other in self.offers(ref.kind, ref.name)
            if other != ref and self.selection.verdict(other).state is State.AVAILABLE
        ]
        rivals = [other for other in others if (other.distribution, other.location) != (ref.distribution, ref.location)]
        if any(other.contract > ref.contract for other in others if other not in rivals):
            return Verdict(State.PASSED_OVER, f"{ref.distribution} offers it for a newer contract too")
        if not rivals:
            return alone
        preferred = self.selection.preferred(ref)
        if preferred == normalise(ref.distribution):
            return Verdict(State.AVAILABLE, "preferred by --plugins-prefer")
        for rival in rivals:
            if preferred == normalise(rival.distribution):
                return Verdict(State.PASSED_OVER, f"--plugins-prefer takes the one of {rival.source}")
        sources = ", ".join(rival.source for rival in rivals)
        return Verdict(
            State.CONFLICT,
            f"also offered by {sources}: say --plugins-prefer {ref.id}=DISTRIBUTION",
        )

    def configured(self, options: PluginConfig, environment: Environment) -> PluginSet:
        """The same discovery under other options: no second walk. Raises ConfigError, PluginError for wrong options."""
        installed = tuple(ref for ref in self.refs if ref.origin is Origin.DISTRIBUTION)
        parsers = {"tool_parser": options.tool_parser_plugin, "reasoning_parser": options.reasoning_parser_plugin}
        named = [*options.plugin, *(f"{kind}={file}" for kind, file in parsers.items() if file)]
        files = dict.fromkeys(ref for option in named for ref in file_refs(option, options.plugin_adapter))
        refs = (*installed, *files)
        selection = parse(options, environment)
        stale = self.selection.unmatched(self.refs)
        return PluginSet(
            refs=refs,
            shadowed=self.shadowed,
            problems=(*(p for p in self.problems if p not in stale), *selection.unmatched(refs)),
            selection=selection,
        )

    def _menu(self, kind: str) -> str:
        names = [f"{name} ({self.origin(kind, name)})" for name in self.names(kind)]
        return f"{kind} plugins here: {', '.join(names) or 'none'}."


def discover(options: PluginConfig | None = None, environment: Environment | None = None) -> PluginSet:
    """Find every plugin that is installed, plus the files that the options name. Imports none of them.

    Call it once, in the launcher, and send the set to the other processes. Raises ConfigError or PluginError when an
    option is malformed or names a file that cannot be read; what is merely installed and broken never raises.
    """
    found = scan()
    unconfigured = PluginSet(refs=found.refs, shadowed=found.shadowed, problems=found.problems)
    return unconfigured.configured(options or PluginConfig(), environment or Environment())
