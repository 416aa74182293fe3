"""References to plugins: what is known of one without importing it."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

BUILTIN = "ferrule"  # the distribution whose plugins are the built-in ones


class Origin(StrEnum):
    """The origin of a reference."""

    DISTRIBUTION = "distribution"
    FILE = "file"
    PATH = "path"  # package.module.Class, which the user named


class PluginRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One plugin that was found. `target` is module:attribute, or an absolute path when the origin is a file.

    An import path is the plugin's name, too, and its package stands for the distribution.
    """

    kind: str
    name: str
    target: str
    distribution: str  # of a file plugin: the file's name
    version: str  # of a file plugin: the beginning of its hash
    contract: int
    origin: Origin = Origin.DISTRIBUTION
    location: str = ""  # folder that holds the distribution's metadata, or the file
    sha256: str = ""  # of a file's content
    extras: str = ""  # of its distribution, which it says that it needs
    adapter: str = ""  # module that makes the plugin of the file: a `FileAdapter`

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def module(self) -> str:
        """Name of the module that the plugin's class is imported from."""
        if self.origin is Origin.FILE:
            return f"_ferrule_file_{self.sha256}{self.adapter and '_adapted'}"
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Name of the class in its module; of a file plugin, "": the file is not run to know it."""
        return "" if self.origin is Origin.FILE else self.target.partition(":")[2]

    @property
    def builtin(self) -> bool:
        return self.origin is Origin.DISTRIBUTION and self.distribution == BUILTIN

    @property
    def given(self) -> bool:
        """Whether the user named the file, or the import path, and not only the plugin."""
        return self.origin is not Origin.DISTRIBUTION

    @property
    def source(self) -> str:
        """Distribution and version, file and hash, or module, for people."""
        if self.origin is Origin.FILE:
            return f"file {self.target} (sha256 {self.version})"
        if self.origin is Origin.PATH:
            return f"module {self.module}"
        return f"{self.distribution} {self.version}"


class Shadow(Struct, frozen=True, kw_only=True):
    """A distribution that is on the path twice: Python takes the first and never sees the second."""

    distribution: str
    version: str
    location: str
    hidden_version: str
    hidden_location: str
    lost: tuple[str, ...]  # kind:name of plugins that only the hidden one has

    def __str__(self) -> str:
        lost = f", which hides {', '.join(self.lost)}" if self.lost else ""
        return (
            f"{self.distribution} is installed twice: {self.version} in {self.location} shadows "
            f"{self.hidden_version} in {self.hidden_location}{lost}"
        )


def normalise(distribution: str) -> str:
    """Return a distribution's name as packaging compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
