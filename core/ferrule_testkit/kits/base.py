"""The base class of conformance kits: each test method checks one promise of a plugin.

The methods use nothing but `promise`, so the same kit runs in two ways: pytest collects a subclass, and `ferrule
plugins check` runs it without pytest.

    class TestMine(PolicyKit):
        plugin = Mine

A plugin that needs other settings than a kit's defaults declares them once, for both ways, in the class attribute
``conformance``: a mapping of settings, or ``"module:NAME"`` of one, so that servers do not import what only checks
need.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import SkipTest

from ferrule.plugin.kinds import KINDS
from ferrule.plugin.options import declared_options, read_options

_PACKAGE = __name__.rpartition(".")[0]


class Broken(AssertionError):
    """A promise that the plugin does not keep."""


def promise(kept: bool, message: str) -> None:
    """Raise Broken unless `kept`. Unlike `assert` it also works under ``python -O``."""
    if not kept:
        raise Broken(message)


def does_not_apply(reason: str) -> None:
    """Skip a test whose promise the plugin does not claim."""
    raise SkipTest(reason)


def shown(value: object, width: int = 120) -> str:
    """Return a value's `repr` for a message, shortened in the middle."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 40]}…{text[-38:]}"


class Kit:
    """A set of promises of one kind of plugin. `plugin` is the class under test. Other annotated attributes of a kit
    are settings, each with a default.

    `name` is the name of its entry point, where a kit needs it and there is one. `plugin_options` are the values that
    `--plugin-config` would give to the plugin.
    """

    kind: ClassVar[str]
    plugin: Any = None
    name: str = ""
    plugin_options: Mapping[str, Any] = MappingProxyType({})

    def setup_method(self) -> None:
        """Prepare one test; pytest and the kits' runner call this before each."""
        self._folders: list[Path] = []
        promise(isinstance(self.plugin, type), f"{type(self).__name__}.plugin must be the plugin's class")
        for name, value in conformance(self.plugin).items():
            promise(name in self.settings(), f"conformance of {self.plugin.__qualname__} has no setting {name!r}")
            if self._owner(name).__module__.startswith(_PACKAGE):
                setattr(self, name, value)

    def teardown_method(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def new(self, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the plugin as a server would, with its options."""
        declared = declared_options(self.plugin)
        options = None if declared is None else read_options(declared, self.plugin_options)
        return KINDS[self.kind].make(self.plugin, options, *args, **kwargs)

    def folder(self) -> Path:
        """Make a new empty folder that is removed after the test."""
        self._folders.append(Path(tempfile.mkdtemp(prefix="ferrule-kit-")))
        return self._folders[-1]

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Return the settings of this kit, with their defaults."""
        names = [name for base in reversed(cls.__mro__) for name in vars(base).get("__annotations__", {})]
        return {name: getattr(cls, name) for name in names if name not in ("kind", "plugin", "name")}

    def _owner(self, name: str) -> type:
        return next(base for base in type(self).__mro__ if name in vars(base))


def conformance(plugin: type) -> Mapping[str, Any]:
    """Return the settings that a plugin's class names for its kit."""
    found = getattr(plugin, "conformance", {})
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(importlib.import_module(module), name)
    promise(isinstance(found, Mapping), f"conformance of {plugin.__qualname__} is not a mapping")
    return found


def promises(kit: type[Kit]) -> Iterator[tuple[str, str]]:
    """Yield (method, sentence) of each promise, in the order of the source, base classes first."""
    names = dict.fromkeys(name for base in reversed(kit.__mro__) for name in vars(base) if name.startswith("test_"))
    for name in names:
        method = getattr(kit, name)
        yield name, " ".join((inspect.getdoc(method) or name.removeprefix("test_").replace("_", " ")).split())
