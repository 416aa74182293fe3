"""Plugins from files: a reference is the file's content, by hash, and each process verifies it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import ExecutionLoader
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Protocol, cast

from ferrule.errors import ConfigError, PluginError, nearest
from ferrule.plugin.kinds import CONTRACT, KINDS
from ferrule.plugin.refs import Origin, PluginRef

_HASH_SHOWN = 12  # hexadecimal digits
_ADAPTERS = MappingProxyType({"vllm": "ferrule_plugins.compat_vllm"})  # by the package that such files import


class FileAdapter(Protocol):
    """A module that makes plugins of files written for another server (--plugin-adapter)."""

    def names(self, kind: str, tree: ast.Module) -> Sequence[str]:
        """Return the names of the plugins that a file offers, from its syntax; none when the file is not for this
        adapter.
        """

    def prepare(self, module: ModuleType) -> None:
        """Prepare the empty module before the file runs in it."""

    def adapt(self, kind: str, name: str, module: ModuleType) -> type:
        """Return the class of a plugin, from the module that has run. Raises PluginError."""


def file_refs(option: str, adapter: str = "") -> list[PluginRef]:
    """Return the references for one value of --plugin, ``kind=file.py`` or ``kind=package.module.Class``.

    The file is parsed, not run, and the class is not imported.

    A class of the file that derives from something and sets ``name = "literal"`` is known under that name; when there
    is none, the file's stem is the name. `adapter` is a module that is asked first: see `FileAdapter`. Raises
    ConfigError for a wrong value, PluginError for a module that does not exist, and for a file that cannot be read or
    parsed, or that needs one of Ferrule's adapters when none was named.
    """
    kind, equals, path = option.partition("=")
    kind = kind.strip()
    if not equals or not path.strip():
        raise ConfigError(f"--plugin takes kind=file.py or kind=package.module.Class, not '{option}'.")
    if kind not in KINDS:
        raise ConfigError(
            f"--plugin {option}: '{kind}' is not a kind of plugin.{nearest(kind, KINDS)}", f"Kinds: {', '.join(KINDS)}"
        )
    file = Path(path.strip()).expanduser().absolute()
    if (named := path_ref(kind, path.strip())) is not None and not file.exists():
        if not _is_here(named.distribution):
            raise PluginError(f"--plugin {option}: there is no module {named.distribution} to import, nor such a file.")
        return [named]
    content = _read(file)
    try:
        tree = ast.parse(content, filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise PluginError(f"Plugin file {file} is not Python: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    adapted = _adapter(adapter).names(kind, tree) if adapter else ()
    if not adapter:
        _check_foreign(kind, file, content, tree)
    return [
        PluginRef(
            kind=kind,
            name=name,
            target=str(file),
            distribution=file.name,
            version=digest[:_HASH_SHOWN],
            contract=CONTRACT,
            origin=Origin.FILE,
            location=str(file),
            sha256=digest,
            adapter=adapter if adapted else "",
        )
        for name in adapted or _declared_names(tree) or [file.stem]
    ]


def path_ref(kind: str, path: str) -> PluginRef | None:
    """Return a reference to a class by its import path, ``package.module.Class``; None for a text that is not such a
    path.
    """
    module, _, name = path.rpartition(".")
    if not module or path.endswith(".py") or not all(part.isidentifier() for part in path.split(".")):
        return None
    return PluginRef(
        kind=kind,
        name=path,
        target=f"{module}:{name}",
        distribution=module.partition(".")[0],
        version="unknown",
        contract=CONTRACT,
        origin=Origin.PATH,
    )


def _is_here(module: str) -> bool:
    """Return whether a top-level module can be found. The module is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # one that was made by hand, as `__main__` is
        return module in sys.modules


def load_file(ref: PluginRef, base: type) -> object:
    """Run the file, if its content is still what was discovered, and return its plugin class.

    Raises PluginError when the content changed or the class cannot be told; anything that the file itself raises
    passes through.
    """
    content = _read(Path(ref.target))
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise PluginError(
            f"Plugin file {ref.target} has changed since it was discovered (sha256 {ref.version} expected).",
            "Start again to use the new content.",
        )
    module = _module(ref, content)
    return _adapter(ref.adapter).adapt(ref.kind, ref.name, module) if ref.adapter else _pick(ref, base, module)


def _check_foreign(kind: str, file: Path, content: bytes, tree: ast.Module) -> None:
    """Check that no adapter of Ferrule's makes plugins of a file. Raises PluginError if one does."""
    for package, adapter in _ADAPTERS.items():
        if package.encode() in content and _adapter(adapter).names(kind, tree):
            raise PluginError(f"Plugin file {file} is written for {package}. It needs --plugin-adapter {adapter}.")


def _adapter(name: str) -> FileAdapter:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise PluginError(f"--plugin-adapter {name} cannot be imported: {error}") from error
    if not all(hasattr(module, part) for part in ("names", "prepare", "adapt")):
        raise PluginError(f"--plugin-adapter {name} is not an adapter of plugin files.")
    return cast(FileAdapter, module)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise PluginError(f"Plugin file {file} cannot be read: {error.strerror or error}") from error


def _declared_names(tree: ast.Module) -> list[str]:
    names: dict[str, None] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not node.bases:
            continue
        for statement in node.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name)))
                    | ast.AnnAssign(target=ast.Name(id="name"), value=ast.Constant(value=str(name)))
                ) if name:
                    names[name] = None
    return list(names)


class _VerifiedLoader(ExecutionLoader):
    """A loader that runs the bytes that were hashed, whatever the file holds by then; no bytecode is cached."""

    def __init__(self, path: str, content: bytes) -> None:
        self._path = path
        self._content = content

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._content)

    def get_filename(self, fullname: str) -> str:
        return self._path


def _module(ref: PluginRef, content: bytes) -> ModuleType:
    name = ref.module
    if name in sys.modules:
        return sys.modules[name]
    loader = _VerifiedLoader(ref.target, content)
    spec = importlib.util.spec_from_file_location(name, ref.target, loader=loader)
    if spec is None:
        raise PluginError(f"Plugin file {ref.target} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if ref.adapter:
            _adapter(ref.adapter).prepare(module)
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pick(ref: PluginRef, base: type, module: ModuleType) -> object:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    candidates = [value.__name__ for value in found]
    if len(found) > 1:
        found = [value for value in found if getattr(value, "name", None) == ref.name]
    if len(found) == 1:
        return found[0]
    listed = f": {', '.join(candidates)}" if candidates else ""
    problem = "more than one" if candidates else "no"
    raise PluginError(
        f"Plugin file {ref.target} holds {problem} complete class for {ref.id}{listed}.",
        f"It must derive from {base.__module__}.{base.__qualname__}; of several, each sets name = '…'.",
    )
