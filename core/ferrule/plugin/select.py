"""Which of the plugins found may be used: allow, deny and prefer.

An item of an allow- or deny-list is ``kind:name``, where either side may be ``*``, or a distribution. Items of
FERRULE_PLUGINS and VLLM_PLUGINS may also be a bare entry name. Deny wins. An allow-list is about third parties:
built-in plugins and files named by --plugin stay, unless they are denied.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from ferrule.plugin.kinds import CONTRACT, KINDS, READABLE
from ferrule.plugin.refs import Origin, PluginRef, normalise


class State(StrEnum):
    """A plugin's state: what happens when its name is asked for."""

    AVAILABLE = "available"
    DENIED = "denied"
    NOT_ALLOWED = "not allowed"
    OFF = "off"  # hooks of third parties until they are named
    NEWER = "for a newer contract"
    OLDER = "for an older contract"
    CONFLICT = "conflict"  # two distributions, and none is preferred
    PASSED_OVER = "passed over"  # another distribution is preferred


class Verdict(Struct, frozen=True):
    state: State
    reason: str = ""


class Preference(Struct, frozen=True):
    """A user's preference, ``kind:name=distribution``."""

    id: str
    distribution: str


class Selection(Struct, frozen=True, omit_defaults=True):
    """The user's wishes, parsed. `allow` is None when there is no allow-list."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    prefer: tuple[Preference, ...] = ()
    allow_source: str = ""  # flag or variable that the allow-list came from
    restricts: bool = True  # False: the allow-list only switches on what is off until it is named

    def verdict(self, ref: PluginRef) -> Verdict:
        """Judge one plugin by itself; rivals of the same name are not looked at."""
        if ref.contract not in READABLE:
            state = State.NEWER if ref.contract > CONTRACT else State.OLDER
            read = " and ".join(f"v{contract}" for contract in sorted(READABLE))
            return Verdict(state, f"made for contract v{ref.contract}; this Ferrule reads {read}")
        for item in self.deny:
            if matches(item, ref):
                return Verdict(State.DENIED, f"denied by --plugins-deny {item}")
        if ref.builtin or ref.given:
            return Verdict(State.AVAILABLE)
        named = self.names(ref)
        if ref.kind == "hooks" and not named:
            return Verdict(
                State.OFF,
                f"hooks are off until --plugins-allow or FERRULE_PLUGINS names {ref.id} or {ref.distribution}",
            )
        if self.allow is not None and self.restricts and not named:
            return Verdict(State.NOT_ALLOWED, f"not on the allow-list of {self.allow_source}")
        return Verdict(State.AVAILABLE)

    def names(self, ref: PluginRef) -> bool:
        """Return whether the user has named this plugin: by an item of the allow-list, or by its file."""
        return ref.given or any(matches(item, ref) for item in self.allow or ())

    def among(self, refs: tuple[PluginRef, ...]) -> Selection:
        """Return the same selection, knowing the plugins that it is about: see `restricts`."""
        if not self.allow:
            return self
        return replace(self, restricts=not all(_switches_on(item, refs) for item in self.allow))

    def prefers(self, ref: PluginRef) -> bool | None:
        """Return whether this plugin is to win its kind and name; None where the user has no preference. The last
        preference counts.
        """
        wishes = [wish.distribution for wish in self.prefer if wish.id == ref.id]
        return _offers(wishes[-1], ref) if wishes else None

    def unmatched(self, refs: tuple[PluginRef, ...]) -> list[str]:
        """Return sentences about items of the user's lists that match no plugin: most likely misspelt."""
        lists = ((self.allow_source, self.allow or ()), ("--plugins-deny", self.deny))
        problems = [
            f"{source}: '{item.removeprefix('*:')}' matches no plugin"
            for source, items in lists
            for item in items
            if not any(matches(item, ref) for ref in refs)
        ]
        problems += [
            f"--plugins-prefer: {wish.distribution} offers no {wish.id}"
            for wish in self.prefer
            if not any(ref.id == wish.id and _offers(wish.distribution, ref) for ref in refs)
        ]
        return problems


def _offers(source: str, ref: PluginRef) -> bool:
    """Return whether a plugin is from this distribution, or from this file, given by its name or its whole path."""
    return normalise(source) == normalise(ref.distribution) or (ref.origin is Origin.FILE and source == ref.target)


def _switches_on(item: str, refs: tuple[PluginRef, ...]) -> bool:
    """Return whether an item of an allow-list is only about kinds that are off until they are named."""
    about = [ref.kind for ref in refs if matches(item, ref)]
    return bool(about) and all(kind in KINDS and KINDS[kind].off_until_named for kind in about)


def matches(item: str, ref: PluginRef) -> bool:
    """Return whether an item of a list is about this plugin. ``*:x`` of a bare name also matches the distribution x."""
    kind, colon, name = item.partition(":")
    if not colon:
        return normalise(item) == normalise(ref.distribution)
    if kind in {"*", ref.kind} and name in {"*", ref.name}:
        return True
    return kind == "*" and normalise(name) == normalise(ref.distribution)
