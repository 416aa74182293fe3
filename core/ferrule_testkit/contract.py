"""The plugin contract as text: every class, field and signature that a plugin's author sees.

``python -m ferrule_testkit.contract`` prints it; ``--write FILE`` renews the snapshot that `tests/contracts` compares.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ferrule
from ferrule.plugin import CONTRACT, KINDS


def contract() -> str:
    """One line per thing that a change could break; docstrings and comments are not part of it."""
    root = Path(ferrule.__file__).parent
    lines = [f"contract {CONTRACT}", ""]
    lines += [f"{kind.group} = {kind.base}" for kind in KINDS.values()]
    for file in [root / "types.py", *sorted((root / "interfaces").glob("*.py"))]:
        name = ".".join(["ferrule", *file.relative_to(root).with_suffix("").parts])
        lines += ["", f"module {name}", *describe(file.read_text(encoding="utf-8"))]
    return "\n".join(lines) + "\n"


def describe(source: str) -> Iterator[str]:
    """Public classes, functions and names of one module's source."""
    for node in ast.parse(source).body:
        yield from _described(node, "")


def _described(node: ast.stmt, indent: str) -> Iterator[str]:
    match node:
        case ast.ClassDef():
            head = [ast.unparse(base) for base in node.bases] + [ast.unparse(word) for word in node.keywords]
            yield from (f"{indent}@{ast.unparse(decorator)}" for decorator in node.decorator_list)
            yield f"{indent}class {node.name}({', '.join(head)})"
            for child in node.body:
                yield from _described(child, indent + "    ")
        case ast.FunctionDef() | ast.AsyncFunctionDef() if _public(node.name) or node.name == "__init__":
            yield from (f"{indent}@{ast.unparse(decorator)}" for decorator in node.decorator_list)
            word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield f"{indent}{word} {node.name}({ast.unparse(node.args)}){returns}"
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]) if _public(name):
            yield f"{indent}{ast.unparse(node)}"


def _public(name: str) -> bool:
    return not name.startswith("_")


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case []:
            print(contract(), end="")
        case ["--write", file]:
            Path(file).write_text(contract(), encoding="utf-8")
        case _:
            print("usage: python -m ferrule_testkit.contract [--write FILE]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
