"""The pages of `docs/reference/plugins`: each kind, from its interface's source, and each package of parts."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import ferrule
from ferrule.plugin import KINDS, Kind
from ferrule_testkit.public import Shown
from tools.contract import homes, shown

_WORDS = {"abstractmethod": "To be defined.", "classmethod": "A class method.", "property": "A property."}
_HEAD = """\
# `{name}`

{module}

| | |
|---|---|
| entry-point group | `{group}` |
| base class | `{base}` |
| chosen by | {chosen_by} |
| to begin with | `ferrule plugins new {name} NAME` |
| its promises | `ferrule plugins check --list {name}`: [Conformance](../../conformance.md) |
"""


@dataclass(frozen=True)
class Definition:
    """A class or a type alias of the contract. `module` is where it is imported from."""

    module: str
    node: ast.ClassDef | ast.Assign
    lines: Sequence[str]

    @property
    def source(self) -> str:
        """The source text, comments and decorators included."""
        decorators = self.node.decorator_list if isinstance(self.node, ast.ClassDef) else []
        first = min([self.node.lineno, *(decorator.lineno for decorator in decorators)])
        return "\n".join(self.lines[first - 1 : self.node.end_lineno])


def pages(templates: Path) -> dict[str, str]:
    """Return the text of each page, by its name: the kind, or the package of parts."""
    known = dict(_definitions())
    kinds = {kind.name: "\n".join(_page(kind, known, templates)) + "\n" for kind in KINDS.values()}
    parts = {module.__name__.replace(".", "_"): "\n".join(_part(module)) for module in shown(Shown.PARTS)}
    return {**kinds, **parts}


def _page(kind: Kind, known: Mapping[str, Definition], templates: Path) -> Iterator[str]:
    module, _, name = kind.base.partition(":")
    base = known[name]
    yield _HEAD.format(
        name=kind.name,
        module=ast.get_docstring(ast.parse("\n".join(base.lines))) or "",
        group=kind.group,
        base=f"{module}.{name}",
        chosen_by=kind.chosen_by,
    )
    yield from _base(base)
    used = _used(base, known)
    if used:
        yield "## What it is handed and hands back\n"
    for other in used:
        definition = known[other]
        yield f"### {other}\n\nFrom `{definition.module}`.\n"
        yield f"```python\n{definition.source}\n```\n"
    code = (templates / kind.name / "src" / "ferrule_example" / "__init__.py").read_text(encoding="utf-8")
    yield f"## An example\n\nWhat `ferrule plugins new {kind.name} example` writes:\n"
    yield f"```python\n{code}```"


def _base(base: Definition) -> Iterator[str]:
    """Describe the base class: its docstring, its attributes, and each method with what it promises."""
    if not isinstance(base.node, ast.ClassDef):
        raise TypeError(f"{base.module} has no class for this kind")
    yield f"## {base.node.name}\n"
    text = ast.get_docstring(base.node)
    if text:
        yield f"{text}\n"
    fields = [node for node in base.node.body if isinstance(node, ast.AnnAssign | ast.Assign)]
    if fields:
        rows = [line for node in fields for line in base.lines[node.lineno - 1 : node.end_lineno]]
        yield "```python\n{}\n```\n".format("\n".join(row.removeprefix("    ") for row in rows))
    for node in base.node.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _told(node):
            yield from _method(node, base.lines)


def _told(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a page describes a method: not a private one, nor a constructor without parameters."""
    if node.name == "__init__":
        return len(node.args.args) > 1 or ast.get_docstring(node) is not None
    return not node.name.startswith("_")


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str], depth: str = "###") -> Iterator[str]:
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    told = [word for name, word in _WORDS.items() if name in names]
    head = "\n".join(line.removeprefix("    ") for line in lines[node.lineno - 1 : node.body[0].lineno - 1])
    yield f"{depth} {node.name}\n"
    yield f"```python\n{head}\n```\n"
    text = ast.get_docstring(node)
    if told:
        yield f"*{' '.join(told)}* {text or ''}".rstrip() + "\n"
    elif text:
        yield f"{text}\n"


def _part(package: ModuleType) -> Iterator[str]:
    """Describe a package of parts to build from: what its `__all__` names."""
    yield f"# `{package.__name__}`\n\n```text\n{inspect.getdoc(package)}\n```\n"
    names = set(package.__all__)
    for file in homes(package):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                yield from _base(Definition(package.__name__, node, text.splitlines()))
            elif isinstance(node, ast.FunctionDef) and node.name in names:
                yield from _method(node, text.splitlines(), "##")


# ---------------------------------------------------------------------------------------------- the source


def _definitions() -> Iterator[tuple[str, Definition]]:
    """Return the classes and aliases of the contract by name, without those of earlier versions."""
    root = Path(ferrule.__file__).parent
    earlier = {form.base.partition(":")[0] for kind in KINDS.values() for form in kind.earlier.values()}
    for file in [root / "types.py", root / "forms.py", *sorted((root / "interfaces").glob("[a-z]*.py"))]:
        module = ".".join(["ferrule", *file.relative_to(root).with_suffix("").parts])
        if module in earlier:
            continue
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, Definition(module, node, text.splitlines())
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, Definition(module, node, text.splitlines())


def _used(base: Definition, known: Mapping[str, Definition]) -> list[str]:
    """Return what the base class derives from and mentions in its types, and so on; not the base classes of other
    kinds.
    """
    bases = {kind.base.partition(":")[2] for kind in KINDS.values()}
    found: dict[str, None] = {}
    todo = [base]
    while todo:
        for name in _mentioned(todo.pop(0)):
            if name in known and name not in found and name not in bases:
                found[name] = None
                todo.append(known[name])
    return list(found)


def _mentioned(definition: Definition) -> Iterator[str]:
    if isinstance(definition.node, ast.ClassDef):
        yield from re.findall(r"`(\w+)`", ast.get_docstring(definition.node) or "")
    for node in ast.walk(definition.node):
        match node:
            case ast.AnnAssign(annotation=part) | ast.arg(annotation=ast.expr() as part) | ast.Assign(value=part):
                yield from _names(part)
            case ast.ClassDef(bases=parts):
                for part in parts:
                    yield from _names(part)
            case ast.FunctionDef(returns=ast.expr() as part) | ast.AsyncFunctionDef(returns=ast.expr() as part):
                yield from _names(part)


def _names(part: ast.expr) -> Iterator[str]:
    for node in ast.walk(part):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)
