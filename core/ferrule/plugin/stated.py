"""What plugins' classes state of themselves, read from source text: nothing is imported.

Importing every candidate would load torch into processes that do without it, and metadata has no room for these facts.
So they are literals of the class: the line of a command, the order in which `auto` asks, the name of a file with
another form of configuration. The core names no built-in plugin; a rule checks that.
"""

from __future__ import annotations

import ast
import sys
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
        if source is None or source.stat().st_size > _LARGEST_SOURCE:
            return None
        tree = ast.parse(source.read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            own = next((each.name for each in node.names if (each.asname or each.name) == name), None)
            if own is not None:  # a package that hands on the class of one of its modules
                return stated(f"{node.module}:{own}", attribute)
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    values = (value for statement in body if (value := _assigned(statement, attribute)) is not None)
    try:
        return ast.literal_eval(next(values))
    except (StopIteration, ValueError):  # none, or an expression
        return None


def _assigned(statement: ast.stmt, attribute: str) -> ast.expr | None:
    """Return the value that a statement assigns to `attribute`, or None."""
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    return statement.value if isinstance(target, ast.Name) and target.id == attribute else None


def _source(module: str) -> Path | None:
    """Return the file of a module. Only the finders of the top-level name are asked: below it, they would import
    packages.
    """
    parts = module.split(".")
    if not all(parts):
        return None
    top = _find(parts[0])
    if top is None or len(parts) == 1:
        return Path(top.origin) if top is not None and top.has_location and top.origin else None
    folders = [Path(folder).joinpath(*parts[1:-1]) for folder in top.submodule_search_locations or ()]
    candidates = (folder / name for folder in folders for name in (f"{parts[-1]}/__init__.py", f"{parts[-1]}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _find(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None
