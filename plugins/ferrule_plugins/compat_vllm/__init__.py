"""Parser plugin files written for vLLM: ``--plugin-adapter ferrule_plugins.compat_vllm``.

Such a file derives from vLLM's `ToolParser` or `ReasoningParser` and registers the class with `register_module`. It
runs unchanged: while vLLM is not installed, its imports from vLLM's documented modules are answered with stand-ins
that exist for that file alone. The class is wrapped in a parser of Ferrule's own interface.
https://docs.vllm.ai/en/latest/features/tool_calling.html#how-to-write-a-tool-parser-plugin

The adapter gets the file's syntax tree, the empty module, and the module after it ran. It replaces `import` in that
module only, not in the process.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from ferrule.errors import PluginError
from ferrule_plugins.compat_vllm.modules import Importer
from ferrule_plugins.compat_vllm.reasoning import wrap_reasoning_parser
from ferrule_plugins.compat_vllm.tools import wrap_tool_parser

_MANAGERS = {
    "tool_parser": (
        "ToolParserManager",
        "get_tool_parser",
        ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"),
    ),
    "reasoning_parser": ("ReasoningParserManager", "get_reasoning_parser", ("vllm.reasoning",)),
}


def names(kind: str, tree: ast.Module) -> Sequence[str]:
    """Return the names that a file registers, if it imports from vLLM."""
    if kind not in _MANAGERS or not any(map(_imports_vllm, ast.walk(tree))):
        return ()
    return tuple(dict.fromkeys(_registered(tree, _MANAGERS[kind][0])))


def prepare(module: ModuleType) -> None:
    """Give the module an `import` of its own, unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": Importer(vars(module))}


def adapt(kind: str, name: str, module: ModuleType) -> type:
    """Return the registered class as a parser of Ferrule. Raises PluginError."""
    wrap = wrap_tool_parser if kind == "tool_parser" else wrap_reasoning_parser
    manager, getter, _ = _MANAGERS[kind]
    try:
        found = getattr(_manager(kind, module), getter)(name)
        return wrap(found, f"{kind}:{name} of file {module.__file__}")
    except KeyError:
        raise PluginError(f"Plugin file {module.__file__} registers no {name!r} with {manager}.") from None


def _manager(kind: str, module: ModuleType) -> Any:
    """Return the registry that the file has used."""
    found = vars(module)["__builtins__"]
    load = (found if isinstance(found, dict) else vars(found))["__import__"]
    name, _, paths = _MANAGERS[kind]
    for path in paths:
        try:
            return getattr(load(path, None, None, (name,)), name)
        except ImportError:
            continue
    raise PluginError(f"The vLLM that is installed has no {name} in {' or '.join(paths)}.")


def _imports_vllm(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").partition(".")[0] == "vllm"
    return isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "vllm" for alias in node.names)


def _registered(tree: ast.Module, manager: str) -> Iterator[str]:
    """Yield the names in ``Manager.register_module(…)`` and ``register_lazy_module(…)``; without one, the decorated
    class's.
    """
    decorated = {
        id(decorator): node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_registration(node.func, manager):
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
            literal = [value for one in given for value in _texts(one)]
            yield from literal or filter(None, [decorated.get(id(node))])


def _is_registration(node: ast.expr, manager: str) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in ("register_module", "register_lazy_module"):
        return False
    owner = node.value
    return (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")) == manager


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.List | ast.Tuple):
        for element in node.elts:
            yield from _texts(element)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
