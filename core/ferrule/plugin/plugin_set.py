"""`Plugins`: what was found and what the user wished, frozen, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ferrule.errors import FerruleError, PluginError, nearest
from ferrule.plugin.kinds import KINDS, Kind
from ferrule.plugin.load import load_ref
from ferrule.plugin.refs import Origin, PluginRef, Shadow, normalise
from ferrule.plugin.scan import scan
from ferrule.plugin.select import Selection, State, Verdict

_USABLE = frozenset({State.AVAILABLE, State.CONFLICT})  # a name in conflict can be chosen: that says what to do


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """Every plugin that was found, and which of them may be used. Crosses processes as msgpack or JSON.

    `refs` has the built-in plugins first, then the others by distribution, then files. `problems` are sentences about
    metadata or options that could not be used; `shadowed` are installs that Python does not see.
    """

    refs: tuple[PluginRef, ...] = ()
    shadowed: tuple[Shadow, ...] = ()
    problems: tuple[str, ...] = ()
    selection: Selection = Selection()

    def names(self, kind: str) -> tuple[str, ...]:
        """Names that can be chosen, built-ins first, broken ones included; so are names that two offer."""
        return tuple(
            dict.fromkeys(ref.name for ref in self.refs if ref.kind == kind and self.verdict(ref).state in _USABLE)
        )

    def load(self, kind: str, name: str) -> Any:
        """Import one plugin and return its class. Raises PluginError: see `find`, and whatever the import did."""
        return load_ref(self.find(kind, name))

    def make(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Import one plugin and make it with what its kind is made with. Raises PluginError: see `load`, `factory`."""
        return self.factory(kind, name)(*args, **kwargs)

    def factory(self, kind: str, name: str) -> Callable[..., Any]:
        """Import one plugin now; what is returned makes an instance at each call, as `make` does.

        What a constructor raises becomes a PluginError, except a FerruleError of its own, what a client's arguments
        cause, and what a device raises while a model is put on it.
        """
        return partial(_made, KINDS[kind], self.title(kind, name), self.load(kind, name))

    def is_builtin(self, kind: str, name: str) -> bool:
        """Whether the name can stand for a plugin that comes with the server."""
        return any(ref.builtin and self.verdict(ref).state in _USABLE for ref in self.offers(kind, name))

    def defaults(self, kind: str) -> tuple[str, ...]:
        """Names that are used, or that `auto` tries, where no option names one."""
        names = self.names(kind)
        return tuple(n for n in names if self.is_builtin(kind, n)) if KINDS[kind].builtin_by_default else names

    def title(self, kind: str, name: str) -> str:
        """How logs and errors name a plugin: kind:name of distribution and version."""
        return f"{kind}:{name} of {self.origin(kind, name)}"

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

    def under(self, selection: Selection, files: tuple[PluginRef, ...] = ()) -> Plugins:
        """The same discovery under other wishes, with plugins from files."""
        installed = tuple(ref for ref in self.refs if ref.origin is Origin.DISTRIBUTION)
        refs = (*installed, *files)
        stale = self.selection.unmatched(self.refs)
        problems = (*(p for p in self.problems if p not in stale), *selection.unmatched(refs))
        return replace(self, refs=refs, problems=problems, selection=selection)

    def _menu(self, kind: str) -> str:
        names = [f"{name} ({self.origin(kind, name)})" for name in self.names(kind)]
        return f"{kind} plugins here: {', '.join(names) or 'none'}."


def _made(kind: Kind, title: str, plugin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return kind.make(plugin, *args, **kwargs)
    except FerruleError:
        raise
    except Exception as error:
        if kind.made_with is None or (kind.on_device and isinstance(error, (MemoryError, RuntimeError))):
            raise
        raise PluginError(f"Plugin {title} cannot be made: {type(error).__name__}: {error}") from error


def discover() -> Plugins:
    """Find every plugin that is installed. Imports none of them.

    Call it once, in the launcher, and send the set to the other processes. What is installed and broken never raises.
    """
    found = scan()
    return Plugins(refs=found.refs, shadowed=found.shadowed, problems=found.problems)
