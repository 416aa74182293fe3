"""What `ferrule --help` prints: the commands, told from metadata and source text, without importing one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from ferrule.config.help import columns, terminal_width
from ferrule.plugin import Plugins

_LARGEST_SOURCE = 256 << 10  # bytes; a larger module is not read for one line of help


def program_page(plugins: Plugins) -> str:
    """The text, as wide as the terminal."""
    return "\n".join(_program(plugins, terminal_width()))


def _program(plugins: Plugins, width: int) -> Iterator[str]:
    yield "usage: ferrule [-h] [-v] COMMAND [options]"
    yield ""
    yield "An LLM inference server in which every piece that varies is a plugin."
    yield ""
    yield "Commands:"
    for name in plugins.names("command"):
        refs = plugins.offers("command", name)
        said = summary(refs[0].target) if len(refs) == 1 else ""
        if not all(ref.builtin for ref in refs):
            said = f"{said} (from {plugins.origin('command', name)})".strip()
        yield from columns("  " + name, said, width, indent=18)
    yield ""
    yield "Options:"
    yield from columns("  -h, --help", "This text; ferrule COMMAND --help tells about a command.", width, 18)
    yield from columns("  --help=WORD", "All options (all), their groups (listgroup), or what has the name.", width, 18)
    yield from columns("  -v, --version", "The version.", width, 18)


def summary(target: str) -> str:
    """The `summary` that the class at "module:Class" declares as a plain text; "" where it is not told so simply."""
    module, _, attribute = target.partition(":")
    try:
        source = _source(module)
        if source is None or source.stat().st_size > _LARGEST_SOURCE:
            return ""
        tree = ast.parse(source.read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError):
        return ""  # a plugin that cannot be read is listed without a word; `plugins check` says what is wrong
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return next(filter(None, map(_summary_value, node.body)), "")
    return ""


def _summary_value(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assign):
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        return ""
    named = isinstance(target, ast.Name) and target.id == "summary"
    return value.value if named and isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _source(module: str) -> Path | None:
    """The file of a module. Only the finders of the top-level name are asked: below it, they would import packages."""
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
