"""`Plugins`: what was found and what the user wished, frozen, the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ferrule.errors import ConfigError, FerruleError, PluginError, StartupError, nearest
from ferrule.extras import absent
from ferrule.plugin.kinds import KINDS, Automatic, Kind
from ferrule.plugin.load import load_ref
from ferrule.plugin.options import PluginOption, declared_options, describe_options, read_options
from ferrule.plugin.refs import Origin, PluginRef, Shadow
from ferrule.plugin.scan import scan
from ferrule.plugin.select import Selection, State, Verdict
from ferrule.plugin.stated import stated

_USABLE = frozenset({State.AVAILABLE, State.CONFLICT})  # a name in conflict can be chosen: that says what to do


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """Every plugin that was found, and which of them may be used. Crosses processes as msgpack or JSON.

    `refs` has the built-in plugins first, then the others by distribution, then files. `problems` are sentences about
    metadata or options that could not be used; `shadowed` are installs that Python does not see. `options` has the
    values of `--plugin-config`, by kind:name and option. An import that takes longer than `import_timeout` seconds, if
    it is not 0, ends the process: only processes that are Ferrule's own have such a limit.
    """

    refs: tuple[PluginRef, ...] = ()
    shadowed: tuple[Shadow, ...] = ()
    problems: tuple[str, ...] = ()
    selection: Selection = Selection()
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    import_timeout: float = 0.0

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names that can be chosen, built-ins first, broken ones included; so are names that two plugins
        offer.
        """
        return tuple(
            dict.fromkeys(ref.name for ref in self.refs if ref.kind == kind and self.verdict(ref).state in _USABLE)
        )

    def load(self, kind: str, name: str) -> Any:
        """Import one plugin and return its class. Raises PluginError: see `find`, and whatever the import did."""
        return load_ref(self.find(kind, name), self.import_timeout)

    def make(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Import one plugin and make it with the arguments of its kind. Raises PluginError: see `load`, `factory`."""
        return self.factory(kind, name)(*args, **kwargs)

    def factory(self, kind: str, name: str) -> Callable[..., Any]:
        """Import one plugin now, read its options, and return a function that makes an instance at each call, as `make`
        does.

        Raises PluginError, and ConfigError for options that the plugin does not have or take. An exception of a
        constructor becomes a PluginError, except a FerruleError of its own, one that a client's arguments cause, and
        one that a device raises while a model is put on it.
        """
        plugin = self.load(kind, name)
        return partial(_made, KINDS[kind], self.title(kind, name), plugin, self._options(kind, name, plugin))

    def _options(self, kind: str, name: str, plugin: Any) -> Any:
        """Return an instance of the plugin's `Options`; None for a plugin that takes none. Raises ConfigError for wrong
        values.
        """
        values = self.options.get(f"{kind}:{name}", {})
        declared = declared_options(plugin)
        where = f"--plugin-config {self.title(kind, name)}"
        if declared is None:
            if f"{kind}:{name}" in self.options:
                raise ConfigError(f"{where}: this plugin takes no options.")
            return None
        try:
            return read_options(declared, values)
        except ValueError as error:
            names = ", ".join(option.name for option in describe_options(declared)) or "none"
            raise ConfigError(f"{where}:\n{error}", f"Its options: {names}.") from None

    def options_of(self, kind: str, name: str) -> tuple[PluginOption, ...]:
        """Return the options that one plugin takes. The plugin is imported. Raises PluginError: see `load`."""
        declared = declared_options(self.load(kind, name))
        return () if declared is None else describe_options(declared)

    def is_builtin(self, kind: str, name: str) -> bool:
        """Return whether the name can stand for a plugin that comes with the server."""
        return any(ref.builtin and self.verdict(ref).state in _USABLE for ref in self.offers(kind, name))

    def is_named(self, kind: str, name: str) -> bool:
        """Return whether the user has named this plugin: by an allow-list, --plugin, --plugins-prefer or
        --plugin-config.
        """
        offers = self.offers(kind, name)
        return f"{kind}:{name}" in self.options or any(
            self.selection.names(ref) or self.selection.prefers(ref) for ref in offers
        )

    def unused(self, kind: str) -> list[tuple[str, str]]:
        """Return the names of built-in plugins that other distributions offer too, each with a sentence about the other
        plugin, which is not used.
        """
        return [
            (ref.name, f"{ref.id} of {ref.source} is not used: {verdict.reason}")
            for ref in self.refs
            if ref.kind == kind and not ref.builtin and self.selection.prefers(ref) is None
            if (verdict := self.verdict(ref)).state is State.PASSED_OVER and self.is_builtin(kind, ref.name)
        ]

    def defaults(self, kind: str) -> tuple[str, ...]:
        """Return the names that are used, or that `auto` tries in this order, where no option names one: see
        `Automatic`.
        """
        names = tuple(name for name in self.names(kind) if self._automatic(kind, name))
        return tuple(sorted(names, key=lambda name: self._order(kind, name))) if KINDS[kind].ordered else names

    def _order(self, kind: str, name: str) -> int:
        order = self.stated(kind, name, "auto_order")
        return order if isinstance(order, int) else 0

    def stated(self, kind: str, name: str, attribute: str) -> Any:
        """Return the literal that a plugin's class assigns to `attribute`, which is read without an import; else
        None.
        """
        usable = (ref for ref in self.offers(kind, name) if self.verdict(ref).state is State.AVAILABLE)
        return next((stated(ref.target, attribute) for ref in usable if ref.attribute), None)

    def chosen(self, kind: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names that an option of several names stands for: no plain name means the defaults, and ``+name``
        is added.
        """
        added = [name.removeprefix("+") for name in names if name.startswith("+")]
        plain = [name for name in names if not name.startswith("+")] or self.defaults(kind)
        return tuple(dict.fromkeys([*plain, *added]))

    def _automatic(self, kind: str, name: str) -> bool:
        rule, offers = KINDS[kind].automatic, self.offers(kind, name)
        if rule is Automatic.ALL or self.is_builtin(kind, name):
            return True
        if any(ref.builtin for ref in offers) and any(self.selection.prefers(ref) for ref in offers):
            return True  # this one takes the place of the built-in one
        return rule is Automatic.ALLOWED and any(self.selection.names(ref) for ref in offers)

    @contextmanager
    def blamed(self, kind: str, name: str) -> Iterator[None]:
        """Wrap code so that errors raised within it name the plugin. Raises PluginError, or the StartupError that was
        raised.
        """
        try:
            yield
        except StartupError as error:
            if not self.is_builtin(kind, name) and self.title(kind, name) not in error.message:
                error.message = f"{self.title(kind, name)}: {error.message}"
            raise
        except Exception as error:
            raise PluginError(f"Plugin {self.title(kind, name)} failed: {type(error).__name__}: {error}") from error

    def title(self, kind: str, name: str) -> str:
        """Return a plugin's title in logs and errors: kind:name of distribution and version."""
        return f"{kind}:{name} of {self.origin(kind, name)}"

    def origin(self, kind: str, name: str) -> str:
        """Return distribution and version, for logs and errors. Where two offer one name, both. Empty when there is
        none.
        """
        refs = self.offers(kind, name)
        chosen = [ref for ref in refs if self.verdict(ref).state is State.AVAILABLE]
        return " and ".join(ref.source for ref in chosen or refs)

    def offers(self, kind: str, name: str) -> tuple[PluginRef, ...]:
        """Return every reference of this kind and name, usable or not."""
        return self._by_id.get((kind, name), ())

    @cached_property
    def _by_id(self) -> dict[tuple[str, str], tuple[PluginRef, ...]]:
        found: dict[tuple[str, str], list[PluginRef]] = {}
        for ref in self.refs:
            found.setdefault((ref.kind, ref.name), []).append(ref)
        return {key: tuple(refs) for key, refs in found.items()}

    def find(self, kind: str, name: str) -> PluginRef:
        """Return the plugin that the name stands for. Raises PluginError when it is missing, denied, ambiguous …"""
        if kind not in KINDS:
            raise PluginError(f"'{kind}' is not a kind of plugin.{nearest(kind, KINDS)}", f"Kinds: {', '.join(KINDS)}")
        judged = [(ref, self.verdict(ref)) for ref in self.offers(kind, name)]
        for ref, verdict in judged:
            if verdict.state is State.AVAILABLE:
                return ref
        if not judged:
            raise PluginError(absent(kind, name, self.names(kind)), self._menu(kind))
        reasons = "; ".join(f"{ref.source}: {verdict.reason}" for ref, verdict in judged)
        raise PluginError(f"Plugin {kind}:{name} cannot be used. {reasons}.", self._menu(kind))

    def verdict(self, ref: PluginRef) -> Verdict:
        """Return what becomes of a plugin of this set when its name is asked for."""
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
        if self.selection.prefers(ref):
            return Verdict(State.AVAILABLE, "preferred by --plugins-prefer")
        for rival in rivals:
            if self.selection.prefers(rival):
                return Verdict(State.PASSED_OVER, f"--plugins-prefer takes the one of {rival.source}")
        if any(rival.builtin for rival in rivals) and ref.origin is Origin.DISTRIBUTION:
            told = f"the built-in one has its name: to use this one, say --plugins-prefer {ref.id}={ref.distribution}"
            return Verdict(State.PASSED_OVER, told)
        if ref.builtin:
            rivals = [rival for rival in rivals if rival.given]  # these the user has named
            if not rivals:
                return alone
        sources = ", ".join(rival.source for rival in rivals)
        return Verdict(
            State.CONFLICT,
            f"also offered by {sources}: say --plugins-prefer {ref.id}=DISTRIBUTION",
        )

    def under(
        self,
        selection: Selection,
        files: tuple[PluginRef, ...] = (),
        options: Mapping[str, dict[str, Any]] | None = None,
    ) -> Plugins:
        """Return the same discovery under another selection, with plugins from files, and with other options of
        plugins.
        """
        installed = tuple(ref for ref in self.refs if ref.origin is Origin.DISTRIBUTION)
        refs = (*installed, *files)
        stale = self.selection.unmatched(self.refs)
        problems = (*(p for p in self.problems if p not in stale), *selection.unmatched(refs))
        return replace(self, refs=refs, problems=problems, selection=selection.among(refs), options=dict(options or {}))

    def _menu(self, kind: str) -> str:
        names = [f"{name} ({self.origin(kind, name)})" for name in self.names(kind)]
        return f"{kind} plugins here: {', '.join(names) or 'none'}."


def _made(kind: Kind, title: str, plugin: Callable[..., Any], options: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return kind.make(plugin, options, *args, **kwargs)
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
