"""The modules that a plugin may import, and a check of sources that are to import nothing else."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# `.*` is every module of the package. docs/plugins.md shows this list.
PUBLIC: tuple[str, ...] = (
    "ferrule",
    "ferrule.types",
    "ferrule.errors",
    "ferrule.config",
    "ferrule.schema",
    "ferrule.sampling_params",
    "ferrule.structured_outputs",
    "ferrule.log",
    "ferrule.interfaces.*",
    "ferrule.execution",
    "ferrule_nn.*",
    "ferrule_quant.*",
    "ferrule_parsing",
    "ferrule_testkit.*",
)
_PACKAGES = (
    *("ferrule", "ferrule_testkit", "ferrule_nn", "ferrule_parsing", "ferrule_quant"),
    *("ferrule_plugins", "ferrule_kernels", "ferrule_contrib"),
)


def is_public(module: str) -> bool:
    return any(
        module == entry or (entry.endswith(".*") and f"{module}.".startswith(entry.removesuffix("*")))
        for entry in PUBLIC
    )


def private_imports(folder: Path) -> Iterator[str]:
    """``file:line: name`` of everything of Ferrule that a project's sources import and may not.

    What begins with an underscore is private, and so is what a public module with ``__all__`` does not name there.
    """
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for module, name in _imported(node):
                if module.partition(".")[0] in _PACKAGES and not _may(module, name):
                    yield f"{file.relative_to(folder)}:{node.lineno}: {module}{name and '.' + name}"  # type: ignore[attr-defined]


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from ((node.module, alias.name) for alias in node.names)


def _may(module: str, name: str) -> bool:
    if is_public(f"{module}.{name}"):  # a module, or below a package that is public as a whole
        return not name.startswith("_")
    if not is_public(module):
        return False
    offered = getattr(importlib.import_module(module), "__all__", None)
    return not name.startswith("_") and (not name or offered is None or name in offered)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m ferrule_testkit.public FOLDER", file=sys.stderr)
        return 2
    found = list(private_imports(Path(argv[0])))
    print("\n".join(found) or "Only public names are imported.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
