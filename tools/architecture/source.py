"""Python source as the rules see it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOTS = ("core", "plugins", "kernels", "contrib_models", "distributions", "tools")


class Violation(NamedTuple):
    """One line that breaks a rule."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


class Import(NamedTuple):
    """An import statement's target. `names` are what `from target import …` takes; `when` is import, typing or lazy."""

    target: str
    names: tuple[str, ...]
    line: int
    when: str


@dataclass(frozen=True)
class Module:
    """A Python file. `path` is relative to the repository, with forward slashes; its first part is one of ROOTS."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The tree's nodes, for the many rules that look at each."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def name(self) -> str:
        """Dotted name; a package's is that of its folder."""
        parts = self.path.removesuffix(".py").split("/")
        # The other roots hold packages, each distribution in its folder `src`; this one is a package.
        parts = parts[{"tools": 0, "distributions": 3}.get(parts[0], 1) :]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The top-level package: ferrule, ferrule_plugins …"""
        return self.name.partition(".")[0]

    @property
    def core(self) -> bool:
        return self.package == "ferrule"

    @property
    def product(self) -> bool:
        """True for code that users run, which the test kit and the tools are not."""
        return self.package not in ("ferrule_testkit", "tools")

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree, self, "import"))

    @cached_property
    def docstrings(self) -> frozenset[int]:
        """Ids of the constant nodes that are docstrings."""
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        firsts = (node.body[0] for node in self.nodes if isinstance(node, owners) and node.body)
        return frozenset(
            id(first.value)
            for first in firsts
            if isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        )

    def violation(self, node: ast.AST, what: str) -> Violation:
        return Violation(self.path, getattr(node, "lineno", 1), what)


Rule = Callable[[Sequence[Module]], list[Violation]]


def read_modules(repository: Path) -> list[Module]:
    """Read every Python file below the folders of ROOTS."""
    return [
        Module(file.relative_to(repository).as_posix(), file.read_text(encoding="utf-8"))
        for root in ROOTS
        for file in sorted((repository / root).rglob("*.py"))
    ]


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call, with the dotted text of the called function ("asyncio.create_task"), empty when it is not a
    plain name.
    """
    for node in module.nodes:
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def dotted(node: ast.AST) -> str:
    """Return "a.b.c" for names and attributes; "" for anything else, ".c" for an attribute of something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def _imports(node: ast.AST, module: Module, when: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, when)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield Import(_absolute(child, module), names, child.lineno, when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, module, "lazy" if when == "import" else when)
        elif isinstance(child, ast.If) and dotted(child.test).rpartition(".")[2] == "TYPE_CHECKING":
            yield from _imports(ast.Module(child.body, []), module, "typing")
            yield from _imports(ast.Module(child.orelse, []), module, when)
        else:
            if isinstance(child, ast.Call) and dotted(child.func) in {"importlib.import_module", "__import__"}:
                yield from (
                    Import(arg.value, (), child.lineno, "lazy")
                    for arg in child.args[:1]
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                )
            yield from _imports(child, module, when)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    if not module.path.endswith("/__init__.py"):
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *filter(None, [node.module])])
