"""The walk over installed distributions. It reads metadata only; one broken distribution does not stop it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions

from msgspec import Struct

from ferrule.errors import nearest
from ferrule.plugin.kinds import KINDS, READABLE, parse_group
from ferrule.plugin.refs import PluginRef, Shadow, normalise

_TARGET = re.compile(r"[\w.]+:[\w.]+")
_NAME = re.compile(r"\w[\w.+-]{0,99}")  # can be typed, and does no harm to a list, a terminal or a URL
_SHOWN = 60  # characters of a wrong text that a problem repeats


class Scan(Struct, frozen=True):
    """What the walk found. `problems` are sentences about metadata that could not be used."""

    refs: tuple[PluginRef, ...]
    shadowed: tuple[Shadow, ...]
    problems: tuple[str, ...]


class _Install:
    """One distribution on the path. Its version is parsed when it is asked for: that is the slow part."""

    def __init__(self, dist: Distribution) -> None:
        self.dist = dist
        self.name = normalise(getattr(dist, "_normalized_name", None) or dist.name)
        self.location = str(dist.locate_file(""))
        text = dist.read_text("entry_points.txt") or ""
        self.text = text if "ferrule." in text else ""

    @property
    def version(self) -> str:
        try:
            version = self.dist.version
        except (KeyError, OSError, UnicodeError):
            return "unknown"
        return version if version and version.isprintable() else "unknown"

    @property
    def metadata(self) -> str:
        """The folder or file that says all this; two in one folder have the same location."""
        return str(getattr(self.dist, "_path", self.location))


def scan() -> Scan:
    """Walk over `distributions()` once. Of a distribution that is there twice, the first counts, as for imports."""
    first: dict[str, _Install] = {}
    shadowed: list[Shadow] = []
    problems: list[str] = []
    for dist in distributions():
        try:
            install = _Install(dist)
        except (KeyError, OSError, UnicodeError, TypeError) as error:
            problems.append(f"metadata of a distribution in {dist.locate_file('')} cannot be read: {error}")
            continue
        known = first.setdefault(install.name, install)
        if known is not install and (shadow := _shadow(known, install)):
            shadowed.append(shadow)
    refs: dict[tuple[int, str, str, str], PluginRef] = {}
    for install in first.values():
        for ref in _refs(install, problems):
            key = (ref.contract, ref.kind, ref.name, ref.distribution)
            if refs.setdefault(key, ref) is not ref:
                problems.append(f"{install.name}: {ref.id} is listed twice; the first counts")
    ordered = sorted(refs.values(), key=lambda ref: (not ref.builtin, ref.distribution))
    return Scan(tuple(ordered), tuple(shadowed), tuple(dict.fromkeys(problems)))


def _refs(install: _Install, problems: list[str]) -> Iterator[PluginRef]:
    if not install.text:
        return
    version = install.version
    for group, name, target, extras in _entries(install, problems):
        parsed = parse_group(group)
        if parsed is None:
            if group.startswith("ferrule."):
                problems.append(f"{install.name} {version}: {group[:_SHOWN]!r} is not a group of Ferrule's")
            continue
        contract, kind = parsed
        if kind not in KINDS and contract in READABLE:
            problems.append(f"{install.name} {version}: '{kind}' is not a kind of plugin.{nearest(kind, KINDS)}")
        elif not _NAME.fullmatch(name):
            problems.append(f"{install.name} {version}: {name[:_SHOWN]!r} cannot be a {kind} plugin's name")
        elif not _TARGET.fullmatch(target):
            shown = target[:_SHOWN]
            problems.append(f"{install.name} {version}: {kind}:{name} = {shown!r} is not of the form module:attribute")
        else:
            yield PluginRef(
                kind=kind,
                name=name,
                target=target,
                distribution=install.name,
                version=version,
                contract=contract,
                location=install.location,
                extras=extras,
            )


def _entries(install: _Install, problems: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """(group, name, target, extras) of each line of entry_points.txt that is well formed."""
    group = ""
    for line in install.text.splitlines():
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            continue
        name, equals, target = line.partition("=")
        if equals and name.strip():
            target, _, extras = target.partition("[")
            yield group, name.strip(), target.strip(), extras.partition("]")[0].strip()
        elif group.startswith("ferrule."):
            problems.append(f"{install.name} {install.version}: entry point {line[:_SHOWN]!r} has no target")


def _shadow(known: _Install, hidden: _Install) -> Shadow | None:
    """None when neither has plugins, and for equals: the same folder twice, or a source tree's own metadata."""
    if not (known.text or hidden.text):
        return None
    if known.text == hidden.text and known.version == hidden.version:
        return None
    ours = {ref.id for ref in _refs(known, [])}
    return Shadow(
        distribution=known.name,
        version=known.version,
        location=known.metadata,
        hidden_version=hidden.version,
        hidden_location=hidden.metadata,
        lost=tuple(ref.id for ref in _refs(hidden, []) if ref.id not in ours),
    )
