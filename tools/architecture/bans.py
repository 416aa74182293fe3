"""What the source does not do."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from tools import ROOT
from tools.architecture.source import Module, Rule, Violation, calls, dotted, functions

ENVIRONMENT = "core/ferrule/env.py"
BUILD = "kernels/ferrule_kernels/building.py"  # runs in installations only, and has a variable of its own
LISTENER = "plugins/ferrule_plugins/command/listen.py"  # the HTTP listener: the one place that may name all interfaces
PLATFORMS = "plugins/ferrule_plugins/platform/"
KINDS_OF_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu"})
KINDS_OF_TENSORS = frozenset({f"is_{kind}" for kind in KINDS_OF_DEVICES})
PICKLERS = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
NO_PICKLE_INSIDE = frozenset({"multiprocessing.shared_memory", "multiprocessing.resource_tracker"})
MUTABLE_CALLS = frozenset({"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"})
MUTATORS = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
)
_CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*|__all__|__path__")
_ALL_INTERFACES = re.compile(r"0\.0\.0\.0|://\*|^::$|\[::\]")

# Names of built-in plugins that are words of options, protocols or types as well.
WORDS = frozenset(
    {
        *("auto", "default", "none", "priority", "health", "docs", "admin", "tokenize", "plugins", "openai", "cpu"),
        *("fp8", "dummy", "hf", "memory", "responses", "suffix"),
    }
)
# Where core names built-in plugins, and why.
NAMING = (
    "core/ferrule/config/",  # defaults and documented values of options
    "core/ferrule/extras.py",  # which extra brings a plugin of our own distributions
)

Check = Callable[[Module], Iterator[Violation]]


@cache
def builtin_names() -> frozenset[str]:
    """Return the names of the plugins that this repository has, its own distributions included."""
    files = (ROOT / "pyproject.toml", *sorted(ROOT.glob("distributions/*/pyproject.toml")))
    projects = [tomllib.loads(file.read_text("utf-8"))["project"] for file in files]
    groups = [each for project in projects for each in project["entry-points"].items()]
    return frozenset(name for group, names in groups if group.startswith("ferrule.v") for name in names)


def core_names_no_plugin(module: Module) -> Iterator[Violation]:
    """Check that core names no built-in plugin: a plugin's class states what core has to know of it."""
    if not module.core or module.path.startswith(NAMING):
        return
    texts = (node for node in module.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for text in texts:
        if text.value in builtin_names() - WORDS and id(text) not in module.docstrings:
            yield module.violation(text, f"names the built-in plugin {text.value!r}")


def no_global(module: Module) -> Iterator[Violation]:
    """Check that state is passed and not found."""
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield module.violation(node, f"global {', '.join(node.names)}")


def no_module_state(module: Module) -> Iterator[Violation]:
    """Check that lists, dicts and sets at module level are constants: named so, and never changed."""
    if not module.core:
        return
    constants: set[str] = set()
    for statement in _module_level(module.tree.body):
        for name, value in _assigned(statement):
            if not _mutable(value):
                continue
            if _CONSTANT.fullmatch(name):
                constants.add(name)
            else:
                yield module.violation(statement, f"{name} is mutable state of the module")
    for node, name in _changes(module.tree):
        if name in constants:
            yield module.violation(node, f"{name} is a constant of the module and is changed here")


def no_pickle_or_eval(module: Module) -> Iterator[Violation]:
    """Check that nothing runs code from data."""
    for imported in module.imports:
        top = imported.target.partition(".")[0]
        if top in PICKLERS:
            yield Violation(module.path, imported.line, f"imports {imported.target}")
        reached = {imported.target, *(f"{imported.target}.{name}" for name in imported.names)}
        if module.product and top == "multiprocessing" and not reached & NO_PICKLE_INSIDE:
            yield Violation(module.path, imported.line, "multiprocessing pickles what it sends")
    for call, name in calls(module):
        if name in {"eval", "exec", "builtins.eval", "builtins.exec"}:
            yield module.violation(call, f"calls {name}")
        if name == "torch.load" and not _keyword_is(call, "weights_only", True):
            yield module.violation(call, "torch.load without weights_only=True")


def no_assert(module: Module) -> Iterator[Violation]:
    """Check that product code has no assert: it disappears under -O, and a check must not."""
    for node in module.nodes:
        if module.product and isinstance(node, ast.Assert):
            yield module.violation(node, "assert in product code")


def environment_in_one_file(module: Module) -> Iterator[Violation]:
    """Check that only one file of the product reads or writes environment variables."""
    if module.path in (ENVIRONMENT, BUILD) or not module.product:
        return
    banned = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in banned and dotted(node.value) in {"os", "posix"}:
            yield module.violation(node, f"os.{node.attr} outside {ENVIRONMENT}")
    for imported in module.imports:
        if imported.target == "os" and banned & set(imported.names):
            yield Violation(module.path, imported.line, f"os.environ outside {ENVIRONMENT}")


def no_remote_code(module: Module) -> Iterator[Violation]:
    """Check that the product never allows a checkpoint's code to run: the user decides that."""
    for call, _ in calls(module):
        if module.product and _keyword_is(call, "trust_remote_code", True):
            yield module.violation(call, "trust_remote_code=True")


def no_wide_bind(module: Module) -> Iterator[Violation]:
    """Check that only the HTTP listener can listen on all interfaces."""
    if module.path == LISTENER or not module.product:
        return
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in module.docstrings:
            match = _ALL_INTERFACES.search(node.value)
            if match:
                yield module.violation(node, f"'{match[0]}' outside {LISTENER}")


def tasks_have_owners(module: Module) -> Iterator[Violation]:
    """Check that tasks have owners: a task without one may be collected while it runs, and nobody sees its
    exception.
    """
    for statement in module.nodes:
        match statement:
            case ast.Expr(value=ast.Call() as call) | ast.Assign(targets=[ast.Name(id="_")], value=ast.Call() as call):
                owner, _, method = dotted(call.func).rpartition(".")
                if method == "ensure_future" or (method == "create_task" and "group" not in owner.lower()):
                    yield module.violation(call, f"{method} whose task nobody holds")


def bounded_caches(module: Module) -> Iterator[Violation]:
    """Check that a cache keyed by arguments has a bound. A cache of a function without parameters holds one value."""
    if not module.core:
        return
    for function in functions(module):
        arguments = function.args
        has_key = any((arguments.posonlyargs, arguments.args, arguments.kwonlyargs, arguments.vararg, arguments.kwarg))
        for decorator in function.decorator_list:
            if has_key and _unbounded(decorator):
                yield module.violation(decorator, f"{function.name} has a cache without a bound")


def exceptions_are_told(module: Module) -> Iterator[Violation]:
    """Check that no handler catches everything, and that none of Exception does nothing."""
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield module.violation(node, "bare except")
            elif _broad(node.type) and all(_does_nothing(statement) for statement in node.body):
                yield module.violation(node, "a broad except that does nothing")
        if (
            isinstance(node, ast.Call)
            and dotted(node.func).rpartition(".")[2] == "suppress"
            and any(_broad(arg) for arg in node.args)
        ):
            yield module.violation(node, "suppress of every exception")


def device_kinds_in_platforms(module: Module) -> Iterator[Violation]:
    """Check that only platforms and kernels know kinds of devices. Other code asks for a device's kernels and features,
    so that other kinds of devices are not forgotten.
    """
    if module.package == "ferrule_kernels" or module.path.startswith(PLATFORMS) or not module.product:
        return
    for node in module.nodes:
        match node:
            case ast.Attribute(attr=attr) if attr in KINDS_OF_TENSORS:
                yield module.violation(node, f"reads .{attr} outside {PLATFORMS}")
            case ast.Attribute(attr="type", value=value) if _is_device(value):
                yield module.violation(node, f"reads a device's type outside {PLATFORMS}")
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                if any(map(_is_device, sides)) and any(map(_names_device, sides)):
                    yield module.violation(node, f"compares a device with one kind outside {PLATFORMS}")


def _rule(check: Check) -> Rule:
    def rule(modules: Sequence[Module]) -> list[Violation]:
        return [violation for module in modules for violation in check(module)]

    rule.__doc__ = check.__doc__
    return rule


BANS: dict[str, Rule] = {
    "core-names-no-plugin": _rule(core_names_no_plugin),
    "no-global": _rule(no_global),
    "no-module-state": _rule(no_module_state),
    "no-pickle-or-eval": _rule(no_pickle_or_eval),
    "no-assert": _rule(no_assert),
    "environment-in-one-file": _rule(environment_in_one_file),
    "no-remote-code": _rule(no_remote_code),
    "no-wide-bind": _rule(no_wide_bind),
    "tasks-have-owners": _rule(tasks_have_owners),
    "bounded-caches": _rule(bounded_caches),
    "exceptions-are-told": _rule(exceptions_are_told),
    "device-kinds-in-platforms": _rule(device_kinds_in_platforms),
}


# ---------------------------------------------------------------------------------------------- parts


def _module_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import, outside functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
            inner += [s for child in ast.iter_child_nodes(statement) for s in getattr(child, "body", ())]
            yield from _module_level([s for s in inner if isinstance(s, ast.stmt)])


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        yield statement.target.id, statement.value


def _mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, name) of every change of the value behind a plain name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in MUTATORS:
                yield node, name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield node, name
            case ast.AugAssign(target=ast.Name(id=name)):
                yield node, name


def _keyword_is(call: ast.Call, name: str, value: object) -> bool:
    return any(
        keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


def _unbounded(decorator: ast.expr) -> bool:
    name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).rpartition(".")[2]
    if name == "cache":
        return True
    if name != "lru_cache" or not isinstance(decorator, ast.Call):
        return False
    sizes = [*decorator.args[:1], *(k.value for k in decorator.keywords if k.arg == "maxsize")]
    return any(isinstance(size, ast.Constant) and size.value is None for size in sizes)


def _is_device(node: ast.expr) -> bool:
    """Return whether an expression is called a device or a device's platform, or makes one."""
    name = dotted(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    return name in {"device", "get_default_device"} or (name == "platform" and isinstance(node, ast.Attribute))


def _names_device(node: ast.expr) -> bool:
    """Return whether an expression names a kind of device, several of them, or makes a device of one kind."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_names_device, node.elts))
    if isinstance(node, ast.Call):
        return dotted(node.func) == "torch.device"
    return isinstance(node, ast.Constant) and node.value in KINDS_OF_DEVICES


def _broad(node: ast.expr) -> bool:
    types = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(dotted(kind).rpartition(".")[2] in {"Exception", "BaseException"} for kind in types)


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
