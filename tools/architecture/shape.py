"""How long things may be. Kernels are exempt as a whole, tables by name."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from types import MappingProxyType

from tools.architecture.source import Module, Rule, Violation, functions

MAX_FUNCTION = 60  # lines, from `def` to the end
MAX_FILE = 450
LONG_FILES = MappingProxyType({"ferrule.types": 490})  # every noun that crosses a process, in one place
MAX_CLASS = 265  # the scheduler, which counts for each API key, and takes blocks ahead of guesses
MAX_PARAMETERS = 7  # without self and cls

# Lines of code without blank lines, comments and docstrings. What must be read to understand serving stays small
# together. Every budget is today's size, rounded up: a layer that grows says so here, with the reason, rather than bend
# code to fit. When one is met, look for the room that is missing first.
SERVING = ("types", "plugin", "interfaces", "hooks", "engine", "runner", "execution")
# About 510 of these lines are for guesses (which are asked for, by load, the passes of speculators, and each request's
# count), and 300 for adapters (pinned ones, loads beside each other, weights that are loaded again, tokens they add).
MAX_SERVING = 7_630
BUDGETS = MappingProxyType(
    {
        "ferrule.forms": 45,
        "ferrule.alike": 40,
        "ferrule.errors": 80,
        "ferrule.extras": 15,
        "ferrule.env": 200,
        "ferrule.env_vllm": 275,  # a table
        "ferrule.log": 200,
        "ferrule.config": 2_815,  # with the object of speculative decoding, older names that contradict it, adapters
        "ferrule.checkpoint": 310,  # finds the file in a form that a plugin reads, names what none can have
        "ferrule.rotary": 165,  # three forms of rotary settings, overrides in each, and what contradicts itself
        "ferrule.slow_start": 70,
        "ferrule.small_files": 30,
        "ferrule.unread": 115,  # half of it a table
        "ferrule.yaml_text": 120,
        "ferrule.schema": 480,
        "ferrule.sampling_params": 180,
        "ferrule.structured_outputs": 540,
        "ferrule.assembly": 1_420,  # runs once, at the start; a speculator and its model too, and contexts of adapters
        "ferrule.wire": 220,
        "ferrule.shared_memory": 120,
        "ferrule.live": 120,
        "ferrule.api_keys": 175,
        "ferrule.client": 480,
        "ferrule.frontend": 4_610,  # with what templates show, tries of constraints, adapters with tokens of their own
        "ferrule.api": 2_290,  # with the budget of bytes, the event loop's guard, and what SIGHUP reloads
        "ferrule.locate": 400,  # with adapters, which a dry run asks hubs for
        "ferrule.launch": 1_310,
        "ferrule.llm": 1_290,  # one engine, three ways to call it: batches, steps, as they come; figures of requests
        "ferrule_files": 2_130,  # half of it GGUF's tables and tokens, a quarter object stores
        "ferrule_nn": 3_060,  # what eighty families are described with: experts, latent attention, states, added rows
        "ferrule_parsing": 2_500,
        "ferrule_protocol": 190,
        "ferrule_quant": 1_020,  # names of layers, words of bits, schemes that several formats have
    }
)

# Files that are tables, not code.
TABLES = frozenset(
    {
        "core/ferrule/config/sections.py",
        "core/ferrule/config/unsupported.py",
        "core/ferrule_testkit/row_recipes.py",
        "plugins/ferrule_plugins/stat_logger/catalog.py",
    }
)


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
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and _lines(node) > MAX_CLASS
    ]


def file_length(modules: Sequence[Module]) -> list[Violation]:
    return [
        Violation(module.path, count, f"the file has {count} lines, more than {most}")
        for module in _measured(modules)
        if (count := len(module.text.splitlines())) > (most := LONG_FILES.get(module.name, MAX_FILE))
    ]


def parameters(modules: Sequence[Module]) -> list[Violation]:
    return [
        module.violation(function, f"{function.name} has {count} parameters, more than {MAX_PARAMETERS}")
        for module in _measured(modules)
        for function in functions(module)
        if (count := _parameters(function)) > MAX_PARAMETERS
    ]


def budgets(modules: Sequence[Module]) -> list[Violation]:
    """Check that each layer of core, and each package beside it, keeps its budget."""
    sizes = sizes_of_parts(modules)
    found = [
        Violation(f"core/{name.replace('.', '/')}", 1, f"{size} lines of code, more than its budget of {BUDGETS[name]}")
        for name, size in sizes.items()
        if size > BUDGETS.get(name, size)
    ]
    serving = sum(sizes.get(f"ferrule.{layer}", 0) for layer in SERVING)
    if serving > MAX_SERVING:
        layers = ", ".join(SERVING)
        found.append(Violation("core/ferrule", 1, f"{layers} have {serving} lines together, more than {MAX_SERVING}"))
    return found


def sizes_of_parts(modules: Sequence[Module]) -> dict[str, int]:
    """Return lines of code by layer of core ("ferrule.engine") and by package beside it ("ferrule_nn")."""
    sizes: dict[str, int] = {}
    for module in modules:
        part = ".".join(module.name.split(".")[: 2 if module.core else 1])
        sizes[part] = sizes.get(part, 0) + code_lines(module)
    return sizes


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
    "budgets": budgets,
    "module-docstring": has_docstring,
}


def code_lines(module: Module) -> int:
    """Count the lines that hold code: no blank lines, comments and docstrings."""
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
    for node in module.nodes:
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
