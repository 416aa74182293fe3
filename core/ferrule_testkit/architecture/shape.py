"""How long things may be. Kernels are exempt as a whole, tables by name."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence

from ferrule_testkit.architecture.source import Module, Rule, Violation, functions

MAX_FUNCTION = 60  # lines, from `def` to the end
MAX_FILE = 450
MAX_CLASS = 250
MAX_PARAMETERS = 7  # without self and cls
MAX_CORE = 10_000  # lines of code in core/ferrule: without blank lines, comments and docstrings

# Files that are tables, not code.
TABLES = frozenset({"core/ferrule/config/sections.py"})


def function_length(modules: Sequence[Module]) -> list[Violation]:
    return [
        module.violation(function, f"{function.name} has {_lines(function)} lines, more than {MAX_FUNCTION}")
        for module in _measured(modules)
        for function in functions(module)
        if _lines(function) > MAX_FUNCTION
    ]


def class_length(modules: Sequence[Module]) -> list[Violation]:
    return [
        module.violation(node, f"{node.name} has {_lines(node)} lines, more than {MAX_CLASS}")
        for module in _measured(modules)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and _lines(node) > MAX_CLASS
    ]


def file_length(modules: Sequence[Module]) -> list[Violation]:
    return [
        Violation(module.path, count, f"the file has {count} lines, more than {MAX_FILE}")
        for module in _measured(modules)
        if (count := len(module.text.splitlines())) > MAX_FILE
    ]


def parameters(modules: Sequence[Module]) -> list[Violation]:
    return [
        module.violation(function, f"{function.name} has {count} parameters, more than {MAX_PARAMETERS}")
        for module in _measured(modules)
        for function in functions(module)
        if (count := _parameters(function)) > MAX_PARAMETERS
    ]


def core_size(modules: Sequence[Module]) -> list[Violation]:
    sizes = {module.path: code_lines(module) for module in modules if module.core}
    total = sum(sizes.values())
    if total <= MAX_CORE:
        return []
    largest = ", ".join(f"{path} {size}" for path, size in sorted(sizes.items(), key=lambda item: -item[1])[:5])
    return [Violation("core/ferrule", 1, f"{total} lines of code, more than {MAX_CORE}; the largest: {largest}")]


def has_docstring(modules: Sequence[Module]) -> list[Violation]:
    return [
        Violation(module.path, 1, "the module has no docstring")
        for module in modules
        if not ast.get_docstring(module.tree)
    ]


SHAPE_RULES: dict[str, Rule] = {
    "function-length": function_length,
    "class-length": class_length,
    "file-length": file_length,
    "parameters": parameters,
    "core-size": core_size,
    "module-docstring": has_docstring,
}


def code_lines(module: Module) -> int:
    """Lines that hold code: no blank lines, comments and docstrings."""
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and id(node) in module.docstrings:
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _measured(modules: Sequence[Module]) -> list[Module]:
    return [m for m in modules if m.package != "ferrule_kernels" and m.path not in TABLES]


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    implicit = 1 if names[:1] in (["self"], ["cls"]) else 0
    return len(names) - implicit + len(args.kwonlyargs)
