"""What plugins' classes state of themselves, read from source text: nothing is imported.

Importing every candidate would load torch into processes that do without it, and metadata has no room for these facts.
So they are literals of the class: the line of a command, the order in which `auto` asks, the name of a file with
another form of configuration. The core names no built-in plugin; a rule checks that.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_LARGEST_SOURCE = 256 << 10  # bytes; a larger module is not read for one value


def stated(target: str, attribute: str) -> Any:
    """Return the literal that the class at "module:Class" assigns to `attribute`; None where it does not do so itself.

    A plugin whose source cannot be read states nothing; `plugins check` says what is wrong with it.
    """
    module, _, name = target.partition(":")
    try:
        source = _source(module)
        if source is None or (found := source.stat()).st_size > _LARGEST_SOURCE:
            return None
        handed_on, classes = _read(source, found.st_mtime_ns)
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError):
        return None
    if name in handed_on:
        return stated(handed_on[name], attribute)
    return classes.get(name, {}).get(attribute)


@lru_cache(maxsize=256)
def _read(source: Path, changed: int) -> tuple[Mapping[str, str], Mapping[str, Mapping[str, Any]]]:
    """Read a source as it was `changed` last: the classes that it only hands on, and the literals of its own classes.

    Raises what reading and parsing raise.
    """
    tree = ast.parse(source.read_bytes())
    handed_on = {
        each.asname or each.name: f"{node.module}:{each.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for each in node.names
    }
    classes = {node.name: dict(_literals(node)) for node in reversed(tree.body) if isinstance(node, ast.ClassDef)}
    return handed_on, classes


def _literals(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Pair the names that the body of a class assigns literals to with these."""
    for statement in reversed(node.body):  # the first of several counts
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target = statement.target
        else:
            continue
        if isinstance(target, ast.Name) and statement.value is not None:
            with suppress(ValueError, TypeError, SyntaxError):  # an expression
                yield target.id, ast.literal_eval(statement.value)


def _source(module: str) -> Path | None:
    """Return the file of a module. Only the finders of the top-level name are asked: below it, they would import
    packages.
    """
    parts = module.split(".")
    if not all(parts):
        return None
    top = _find(parts[0], tuple(sys.path))
    if len(parts) == 1:
        return Path(top.origin) if top.has_location and top.origin else None
    folders = [Path(folder).joinpath(*parts[1:-1]) for folder in top.submodule_search_locations or ()]
    candidates = (folder / name for folder in folders for name in (f"{parts[-1]}/__init__.py", f"{parts[-1]}.py"))
    return next((path for path in candidates if path.is_file()), None)


@lru_cache(maxsize=256)
def _find(name: str, path: tuple[str, ...]) -> ModuleSpec:
    """Find a top-level module with this `sys.path`; a hundred plugins are in a few. Raises ImportError where there is
    none, which is not remembered.
    """
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    raise ImportError(f"No module named {name!r}")
