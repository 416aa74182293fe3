"""The walk over installed distributions. It reads metadata only; one broken distribution does not stop it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import Distribution, distributions
from pathlib import Path

from msgspec import Struct

from ferrule.errors import nearest
from ferrule.plugin.kinds import KINDS, READABLE, parse_group
from ferrule.plugin.refs import PluginRef, Shadow, normalise

_TARGET = re.compile(r"[\w.]+:[\w.]+")
_NAME = re.compile(r"\w[\w.+-]{0,99}")  # can be typed, and does no harm to a list, a terminal or a URL
_SHOWN = 60  # characters of a wrong text that a problem repeats
_MOST_BYTES = 1 << 20  # of entry_points.txt; real ones have kilobytes
_MOST_PLUGINS = 4096  # of one distribution; the built-in ones are a few hundred
_HEAD_BYTES = 1 << 16  # of METADATA that are looked at: name and version come first
_NOT_THERE = (FileNotFoundError, IsADirectoryError, KeyError, NotADirectoryError, PermissionError)


class Scan(Struct, frozen=True):
    """The findings of a walk. `problems` are sentences about metadata that could not be used."""

    refs: tuple[PluginRef, ...]
    shadowed: tuple[Shadow, ...]
    problems: tuple[str, ...]


class _Install:
    """One distribution on the path. Its version is read when it is asked for: that is the slow part.

    Raises OSError or ValueError for metadata that cannot be read, also where it is not in regular files.
    """

    def __init__(self, dist: Distribution) -> None:
        self.dist = dist
        self.location = str(dist.locate_file(""))
        folder, extension = os.path.splitext(os.path.basename(self.metadata))
        known = folder.partition("-")[0] if extension in {".dist-info", ".egg-info"} else self._head("Name")
        if not known:
            raise ValueError("it has no name")
        self.name = normalise(known)
        text = _read(dist, "entry_points.txt", _MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"entry_points.txt of {self.name} has more than {_MOST_BYTES} bytes")
        self.text = text.decode() if b"ferrule." in text else ""

    @cached_property
    def version(self) -> str:
        try:
            version = self._head("Version")
        except (OSError, ValueError):
            return "unknown"
        return version if version and version.isprintable() else "unknown"

    def _head(self, key: str) -> str:
        """Return a header of the metadata; "" without one."""
        for file in ("METADATA", "PKG-INFO", ""):  # the last: an .egg-info that is a file
            if text := _read(self.dist, file, _HEAD_BYTES):
                for line in text.decode(errors="replace").splitlines():
                    name, colon, value = line.partition(":")
                    if colon and name.lower() == key.lower():
                        return value.strip()
                    if not line.strip():
                        break
        return ""

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
        except (KeyError, OSError, ValueError, TypeError) as error:
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


def _read(dist: Distribution, name: str, limit: int) -> bytes:
    """Read the first `limit` bytes of a file of a distribution's metadata; none where there is no such file.

    Raises OSError for a pipe or a device, which might never end. Opening one does not wait.
    """
    folder = getattr(dist, "_path", None)
    try:
        if folder is None:  # found by a finder of somebody else's, which alone can read it
            return (dist.read_text(name) or "").encode()[:limit]
        if not isinstance(folder, Path):  # within an archive
            with (folder.joinpath(name) if name else folder).open("rb") as file:
                return bytes(file.read(limit))
        path = folder / name if name else folder
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{path} is not a regular file")
            return file.read(limit)
    except _NOT_THERE:
        return b""


def _entries(install: _Install, problems: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (group, name, target, extras) of each well-formed line of entry_points.txt in Ferrule's groups."""
    group = ""
    count = 0
    for line in install.text.splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            continue
        if not group.startswith("ferrule.") or not line or line[0] in "#;":
            continue
        count += 1
        if count > _MOST_PLUGINS:
            problems.append(f"{install.name} {install.version}: only the first {_MOST_PLUGINS} plugins are looked at")
            return
        name, equals, target = line.partition("=")
        if equals and name.strip():
            target, _, extras = target.partition("[")
            yield group, name.strip(), target.strip(), extras.partition("]")[0].strip()
        else:
            problems.append(f"{install.name} {install.version}: entry point {line[:_SHOWN]!r} has no target")


def _shadow(known: _Install, hidden: _Install) -> Shadow | None:
    """Describe an installation that another one hides.

    None when neither has plugins, and for equal ones: the same folder twice, or a source tree's own metadata.
    """
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
