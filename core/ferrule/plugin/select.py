"""Which of the plugins found may be used: allow, deny and prefer.

An item of an allow- or deny-list is ``kind:name``, where either side may be ``*``, or a distribution. Items of
FERRULE_PLUGINS and VLLM_PLUGINS may also be a bare entry name. Deny wins. An allow-list is about third parties:
built-in plugins and files named by --plugin stay, unless they are denied.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from ferrule.plugin.kinds import CONTRACT, READABLE
from ferrule.plugin.refs import Origin, PluginRef, normalise


class State(StrEnum):
    """What becomes of a plugin when its name is asked for."""

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
    """``kind:name=distribution``."""

    id: str
    distribution: str


class Selection(Struct, frozen=True, omit_defaults=True):
    """The user's wishes, parsed. `allow` is None when there is no allow-list."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    prefer: tuple[Preference, ...] = ()
    allow_source: str = ""  # flag or variable that the allow-list came from

    def verdict(self, ref: PluginRef) -> Verdict:
        """Judge one plugin by itself; rivals of the same name are not looked at."""
        if ref.contract not in READABLE:
            state = State.NEWER if ref.contract > CONTRACT else State.OLDER
            read = " and ".join(f"v{contract}" for contract in sorted(READABLE))
            return Verdict(state, f"made for contract v{ref.contract}; this Ferrule reads {read}")
        for item in self.deny:
            if matches(item, ref):
                return Verdict(State.DENIED, f"denied by --plugins-deny {item}")
        if ref.builtin or ref.origin is Origin.FILE:
            return Verdict(State.AVAILABLE)
        named = self.allow is not None and any(matches(item, ref) for item in self.allow)
        if ref.kind == "hooks" and not named:
            return Verdict(
                State.OFF,
                f"hooks are off until --plugins-allow or FERRULE_PLUGINS names {ref.id} or {ref.distribution}",
            )
        if self.allow is not None and not named:
            return Verdict(State.NOT_ALLOWED, f"not on the allow-list of {self.allow_source}")
        return Verdict(State.AVAILABLE)

    def preferred(self, ref: PluginRef) -> str | None:
        """The distribution that is to win this kind and name, normalised; the last wish counts."""
        wishes = [wish.distribution for wish in self.prefer if wish.id == ref.id]
        return normalise(wishes[-1]) if wishes else None

    def unmatched(self, refs: tuple[PluginRef, ...]) -> list[str]:
        """Sentences about wishes that concern no plugin: most likely misspelt."""
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
            if not any(
                ref.id == wish.id and normalise(ref.distribution) == normalise(wish.distribution) for ref in refs
            )
        ]
        return problems


def matches(item: str, ref: PluginRef) -> bool:
    """True when an item of a list is about this plugin. ``*:x`` of a bare name also matches the distribution x."""
    kind, colon, name = item.partition(":")
    if not colon:
        return normalise(item) == normalise(ref.distribution)
    if kind in {"*", ref.kind} and name in {"*", ref.name}:
        return True
    return kind == "*" and normalise(name) == normalise(ref.distribution)
